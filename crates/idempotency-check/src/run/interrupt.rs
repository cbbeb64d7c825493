//! One interruption of one message.

use std::time::{Duration, Instant};

use futures_util::future::join;
use tokio::time::{sleep, timeout};

use crate::Error;
use crate::client::{Calling, Variant};
use crate::effects::Reading;
use crate::judge::{Interruption, Verdict};
use crate::proxy::{Cut, Then, Trap};
use crate::report::Try;
use crate::talk::{ATTEMPT, Talk};

use super::{Run, SETTLE};

/// How long the service may take to notice that its client has hung up.
const HANG_UP: Duration = Duration::from_millis(100);
/// How long the check waits until the duplicate is answered, or until the duplicate itself waits in the database.
const DUPLICATE: Duration = Duration::from_millis(700);

impl<'a> Run<'a> {
    pub(super) async fn interrupt(&mut self, message: usize, interruption: Interruption) -> Result<Try, Error> {
        if let Some(service) = &mut self.service {
            service.revive().await?;
        }
        let mut talk = self.talk();
        let before = self.before(&talk.key).await?;
        let cut = match interruption {
            Interruption::LostBefore => Cut::Before,
            Interruption::LostAfter => Cut::After,
            Interruption::HangUp | Interruption::Killed | Interruption::Duplicate => Cut::Hold,
        };
        self.proxy.number(Some(Trap { place: self.places[message - 1].clone(), cut }));
        let mut first = talk.call(Variant::Plain);
        let early = match &mut first {
            Some(first) => tokio::select! {
                biased;
                () = self.proxy.fired() => None,
                answer = timeout(ATTEMPT, first) => answer.ok(),
            },
            None => None,
        };
        if let Some(answer) = early {
            first = None;
            talk.heard("first", answer);
            // A service can answer the client before it sends the message to the database.
            tokio::select! { () = self.proxy.fired() => {} _ = self.proxy.settle(SETTLE) => {} }
        }
        let reached = self.proxy.has_fired();
        let mut broken = None;
        if reached {
            broken = self.act(interruption, first, &mut talk, &before).await?;
        } else if let Some(first) = first {
            talk.hear("first", first).await;
        }
        match &mut self.service {
            Some(service) => tokio::select! { () = talk.retry() => {} ended = service.keep() => drop(ended?) },
            None => talk.retry().await,
        }
        if !talk.finals().is_empty()
            && self.again(&mut talk, &before).await?
            && self.refuses
            && let Some(Ok(answer)) = talk.vary("other-body", Variant::OtherBody).await
            && answer.is_success()
        {
            broken = broken.or(Some((Verdict::NotRefused, "another body under the key is accepted".to_owned())));
        }
        let place = format!("{message}:{}", interruption.name());
        let effect = self.after(&talk.key, before, &place).await?;
        let judged = self.expected.judge(&effect, &talk.finals(), self.options.compare);
        let (verdict, detail) = if judged.0 == Verdict::OneEffect { broken.unwrap_or(judged) } else { judged };
        let tried = self.tried(talk, reached.then_some(verdict), detail, &effect);
        Ok(Try { message: Some(message), interruption: Some(interruption), reached, ..tried })
    }

    /// Interrupts the message that the trap has caught. If the try has already gone wrong, returns the verdict and its
    /// detail.
    async fn act(
        &mut self,
        interruption: Interruption,
        first: Option<Calling<'a>>,
        talk: &mut Talk<'a>,
        before: &Reading,
    ) -> Result<Option<(Verdict, String)>, Error> {
        match interruption {
            Interruption::LostBefore | Interruption::LostAfter => {
                if let Some(first) = first {
                    talk.hear("first", first).await;
                }
            }
            Interruption::HangUp => {
                drop(first);
                self.proxy.say("the client hangs up");
                sleep(HANG_UP).await;
                self.proxy.say("the message is let go");
                self.proxy.let_go(Then::Pass);
            }
            Interruption::Killed => {
                if let Some(service) = &mut self.service {
                    service.kill().await;
                    self.proxy.say("the process is killed; the server executes the message all the same");
                    self.proxy.let_go(Then::Orphan);
                    if let Some(first) = first {
                        talk.hear("first", first).await;
                    }
                    service.start().await?;
                    talk.begin_again(self.options.patience);
                    self.proxy.say("the process is started again");
                }
            }
            Interruption::Duplicate => return self.duplicate(first, talk, before).await,
        }
        Ok(None)
    }

    async fn duplicate(
        &mut self,
        first: Option<Calling<'a>>,
        talk: &mut Talk<'a>,
        before: &Reading,
    ) -> Result<Option<(Verdict, String)>, Error> {
        let mut beside = talk.beside();
        let Some(mut second) = talk.call(Variant::Plain) else { return Ok(None) };
        self.proxy.say("a duplicate is sent");
        let answered = tokio::select! {
            answer = &mut second => Some(answer),
            () = self.proxy.pause(Instant::now(), DUPLICATE) => None,
        };
        let is_answered = answered.is_some();
        let mut broken = None;
        if let Some(answer) = answered {
            beside.heard("duplicate", answer);
            let is_promised = beside.finals().first().is_some_and(|answer| answer.is_success());
            if is_promised && !self.is_kept(talk, before, |effect| !effect.is_none()).await? {
                let detail = "the duplicate was told of success while nothing was committed".to_owned();
                broken = Some((Verdict::NoEffectButSuccess, detail));
            }
        }
        self.proxy.say("the message is let go");
        self.proxy.let_go(Then::Pass);
        let first = async {
            if let Some(first) = first {
                talk.hear("first", first).await;
            }
        };
        let second = async {
            if !is_answered {
                beside.hear("duplicate", second).await;
            }
        };
        join(first, second).await;
        talk.join(beside);
        Ok(broken)
    }
}
