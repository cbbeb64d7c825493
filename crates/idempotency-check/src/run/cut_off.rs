//! Requests that the client first cuts off, and then sends whole.

use std::time::{Duration, Instant};

use h2::Reason;

use crate::Error;
use crate::client::{CutOff, Variant};
use crate::judge::Verdict;

use super::{Run, SETTLE};

/// How long a service may take to begin the work for a request that was cut off.
const BEGINS: Duration = Duration::from_millis(300);

const RESETS: [(&str, Reason); 3] = [
    ("reset_no_error", Reason::NO_ERROR),
    ("reset_cancel", Reason::CANCEL),
    ("reset_internal_error", Reason::INTERNAL_ERROR),
];

impl Run<'_> {
    pub(super) async fn cut_off(&mut self) -> Result<(), Error> {
        // The pair (true, true) is missing, because an HTTP/1.1 request is whole if it has a `Content-Length` and
        // contains every byte.
        self.uploads("cut_off", None, &[(true, false), (false, false), (false, true)]).await?;
        let speaks_http2 = self.speaks_http2().await?;
        for (check, code) in RESETS {
            if speaks_http2 {
                let all = [(true, false), (true, true), (false, false), (false, true)];
                self.uploads(check, Some(code), &all).await?;
            } else {
                self.untried(check, "not tried: the service does not speak HTTP/2");
            }
        }
        Ok(())
    }

    async fn speaks_http2(&mut self) -> Result<bool, Error> {
        let mut talk = self.talk();
        let before = self.before(&talk.key).await?;
        self.proxy.number(None);
        let answer = talk.vary("http2", Variant::OverHttp2).await;
        self.after(&talk.key, before, "a request of HTTP/2").await?;
        Ok(answer.is_some_and(|answer| answer.is_ok()))
    }

    /// Sends one upload for each pair of `has_length` and `has_every_byte`, until there is a finding.
    async fn uploads(
        &mut self,
        check: &'static str,
        code: Option<Reason>,
        pairs: &[(bool, bool)],
    ) -> Result<(), Error> {
        for &(has_length, has_every_byte) in pairs {
            let cut = CutOff { code, has_length, has_every_byte };
            let mut talk = self.talk();
            let before = self.before(&talk.key).await?;
            self.proxy.number(None);
            let sent = Instant::now();
            if talk.vary("cut-off", Variant::CutOff(cut)).await.is_none() {
                self.untried(check, "not tried: the request has no body that could be cut off");
                return Ok(());
            }
            self.proxy.say(cut.to_string());
            self.proxy.pause(sent, BEGINS).await;
            self.proxy.settle(SETTLE).await;
            let early = self.effects.settled(&talk.key).await?.since(&before);
            talk.ask("whole").await;
            talk.retry().await;
            self.again(&mut talk, &before).await?;
            let effect = self.after(&talk.key, before, check).await?;
            let (verdict, detail) = if early.is_none() {
                self.expected.judge(&effect, &talk.finals(), self.options.compare)
            } else {
                (Verdict::PerformedThoughCutOff, format!("{cut}; the effect was {early}"))
            };
            self.add(check, Some(verdict), detail, talk, &effect);
            if verdict != Verdict::OneEffect {
                break;
            }
        }
        Ok(())
    }
}
