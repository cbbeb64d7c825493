//! Requests without an interruption.

use futures_util::future::join_all;

use crate::Error;
use crate::client::Variant;
use crate::effects::Effect;
use crate::judge::Verdict;
use crate::report::Try;
use crate::talk::Talk;

use super::{Progress, Run};

/// How many times a race is tried. In the first race, the service's pool may still open its connections.
const RACES: usize = 3;

impl<'a> Run<'a> {
    pub(super) async fn undisturbed(&mut self) -> Result<(), Error> {
        self.at_once("again", 1, 1).await?;
        self.at_once("two_at_once", 2, RACES).await?;
        self.at_once("sixteen_at_once", 16, RACES).await?;
        self.another_body().await?;
        self.no_key().await?;
        self.another_user().await?;
        self.cut_off().await
    }

    /// Lets this number of clients send the request with one key at once, and then sends the request again. Runs the
    /// race up to `races` times until there is a finding, because a faulty service does not fail in every race.
    async fn at_once(&mut self, check: &'static str, clients: usize, races: usize) -> Result<(), Error> {
        for _ in 0..races {
            let mut talk = self.talk();
            let before = self.before(&talk.key).await?;
            self.proxy.number(None);
            let each = (0..clients).map(|_| {
                let mut client = talk.beside();
                async move {
                    client.ask("first").await;
                    client.retry().await;
                    client
                }
            });
            let answered = join_all(each).await;
            let unanswered = answered.iter().filter(|client| client.finals().is_empty()).count();
            answered.into_iter().for_each(|client| talk.join(client));
            self.again(&mut talk, &before).await?;
            let effect = self.after(&talk.key, before, check).await?;
            let (mut verdict, mut detail) = self.expected.judge(&effect, &talk.finals(), self.options.compare);
            if verdict == Verdict::OneEffect && unanswered > 0 {
                (verdict, detail) = (Verdict::Stuck, format!("{unanswered} clients never got a final answer"));
            }
            self.add(check, Some(verdict), detail, talk, &effect);
            if verdict != Verdict::OneEffect {
                break;
            }
        }
        Ok(())
    }

    pub(super) async fn another_body(&mut self) -> Result<(), Error> {
        let mut talk = self.talk();
        if talk.call(Variant::OtherBody).is_none() {
            self.untried("another_body", "not tried: the request has no body that could be changed");
            return Ok(());
        }
        let before = self.before(&talk.key).await?;
        self.proxy.number(None);
        talk.ask("first").await;
        talk.retry().await;
        let answer = talk.vary("other-body", Variant::OtherBody).await;
        let effect = self.after(&talk.key, before, "another_body").await?;
        let status = answer.and_then(Result::ok).map(|answer| (answer.status, answer.is_success()));
        self.refuses = status.is_some_and(|(_, success)| !success);
        let (verdict, detail) = match status {
            _ if effect.exceeds(&self.expected.effect) => {
                let text = format!("the effect is {effect} instead of {}", self.expected.effect);
                (Some(Verdict::TwoEffects), text)
            }
            Some((status, true)) => (Some(Verdict::NotRefused), format!("another body was answered {status}")),
            Some((status, false)) => (Some(Verdict::OneEffect), format!("refused with {status}")),
            None => (Some(Verdict::Stuck), "another body got no answer".to_owned()),
        };
        self.add("another_body", verdict, detail, talk, &effect);
        // The service may have refused the body because of its content, and not because the key was used before. So
        // the body is also sent with a new key.
        let mut talk = self.talk();
        let before = self.before(&talk.key).await?;
        let accepted = talk.vary("other-body", Variant::OtherBody).await;
        self.after(&talk.key, before, "another_body").await?;
        if !accepted.is_some_and(|answer| answer.is_ok_and(|answer| answer.is_success())) {
            let text = "the changed body is refused under a new key too, so its refusal under a used one shows nothing: \
                        give one with --other-json";
            self.report.notes.push(text.to_owned());
        }
        Ok(())
    }

    async fn no_key(&mut self) -> Result<(), Error> {
        let mut talk = self.talk();
        if talk.call(Variant::NoKey).is_none() {
            self.untried("no_key", "not tried: the key is a part of the request");
            return Ok(());
        }
        let before = self.before(&talk.key).await?;
        self.proxy.number(None);
        talk.vary("keyless", Variant::NoKey).await;
        let effect = self.after(&talk.key, before, "no_key").await?;
        let status = talk.told.last().and_then(|told| told.status).map_or("nothing".to_owned(), |it| it.to_string());
        let detail = format!("answered {status}; the effect is {effect}");
        self.add("no_key", None, detail, talk, &effect);
        Ok(())
    }

    async fn another_user(&mut self) -> Result<(), Error> {
        let mut talk = self.talk();
        if talk.call(Variant::OtherUser).is_none() {
            self.untried("another_user", "not tried: --other-header names no other user");
            return Ok(());
        }
        self.before(&talk.key).await?;
        self.proxy.number(None);
        talk.ask("first").await;
        talk.retry().await;
        self.proxy.settle(super::SETTLE).await;
        let before = self.effects.settled(&talk.key).await?;
        let answer = talk.vary("other-user", Variant::OtherUser).await;
        let effect = self.after(&talk.key, before, "another_user").await?;
        if self.alone.is_some() {
            // Both users sent this key, so a late effect may belong to the first user.
            self.ended.pop();
        }
        let (verdict, detail) = match answer {
            Some(Ok(answer)) if answer.is_success() && effect.is_none() => {
                (Verdict::NoEffectButSuccess, "another user was answered instead of the first one".to_owned())
            }
            Some(Ok(answer)) if answer.is_success() => (Verdict::OneEffect, String::new()),
            Some(Ok(answer)) => {
                (Verdict::RefusedThoughRetried, format!("another user with the same key was told {}", answer.status))
            }
            _ => (Verdict::Stuck, "another user got no answer".to_owned()),
        };
        self.add("another_user", Some(verdict), detail, talk, &effect);
        Ok(())
    }

    pub(super) fn untried(&mut self, check: &'static str, why: &str) {
        let talk = self.talk();
        self.add(check, None, why.to_owned(), talk, &Effect::default());
    }

    pub(super) fn add(
        &mut self,
        check: &'static str,
        verdict: Option<Verdict>,
        detail: String,
        talk: Talk<'a>,
        effect: &Effect,
    ) {
        let shown = verdict.map_or("not judged".to_owned(), |verdict| verdict.to_string());
        let line = format!("{}: {shown}", check.replace('_', " "));
        (self.options.progress)(Progress::Line(&line));
        let tried = self.tried(talk, verdict, detail, effect);
        self.report.undisturbed.push(Try { check: Some(check), ..tried });
    }
}
