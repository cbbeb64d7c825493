//! The requests of a client with one key, and the answers to them.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use crate::client::{Answer, Caller, Calling, Variant};
use crate::proxy::Proxy;
use crate::report::Told;

/// The pause before the first retry. Each further pause is twice as long, up to `LONGEST_PAUSE`.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// How long the client waits for an answer. A service that has lost its connection may hang, and the client then tries
/// again.
pub(crate) const ATTEMPT: Duration = Duration::from_secs(10);

pub(crate) struct Talk<'a> {
    caller: &'a dyn Caller,
    proxy: &'a Proxy,
    again: &'a [u16],
    pub(crate) key: String,
    deadline: Instant,
    finals: Vec<Answer>,
    pub(crate) told: Vec<Told>,
}

impl<'a> Talk<'a> {
    pub(crate) fn new(caller: &'a dyn Caller, proxy: &'a Proxy, again: &'a [u16], patience: Duration) -> Self {
        let deadline = Instant::now() + patience;
        let key = Uuid::new_v4().to_string();
        Self { caller, proxy, again, key, deadline, finals: Vec::new(), told: Vec::new() }
    }

    /// Restarts the time of `patience`, because the time until now was not the service's fault.
    pub(crate) fn begin_again(&mut self, patience: Duration) {
        self.deadline = Instant::now() + patience;
    }

    /// Another client with the same key.
    pub(crate) fn beside(&self) -> Self {
        let key = self.key.clone();
        Self { key, deadline: self.deadline, finals: Vec::new(), told: Vec::new(), ..*self }
    }

    /// Prepares a request. The request is sent when its future is first polled.
    pub(crate) fn call(&self, variant: Variant) -> Option<Calling<'a>> {
        self.caller.call(&self.key, variant)
    }

    /// Waits for an answer, and remembers it.
    pub(crate) async fn hear(&mut self, request: &'static str, calling: Calling<'_>) {
        let left = self.deadline.saturating_duration_since(Instant::now()).max(PAUSE).min(ATTEMPT);
        let answer = timeout(left, calling).await.unwrap_or_else(|_| Err("no answer in time".to_owned()));
        self.heard(request, answer);
    }

    pub(crate) fn heard(&mut self, request: &'static str, answer: Result<Answer, String>) {
        self.tell(request, &answer);
        if let Ok(answer) = answer
            && !self.again.contains(&answer.status)
        {
            self.finals.push(answer);
        }
    }

    /// Sends the request, and remembers the answer.
    pub(crate) async fn ask(&mut self, request: &'static str) {
        if let Some(calling) = self.call(Variant::Plain) {
            self.hear(request, calling).await;
        }
    }

    /// Repeats the request until there is a final answer, or until `deadline` has passed.
    pub(crate) async fn retry(&mut self) {
        let mut pause = PAUSE;
        while self.finals.is_empty() && Instant::now() < self.deadline {
            sleep(pause.min(self.deadline.saturating_duration_since(Instant::now()))).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            self.ask("retry").await;
        }
    }

    /// Sends a variant of the request under the same key. The answer does not count as an answer to the request itself.
    pub(crate) async fn vary(&mut self, request: &'static str, variant: Variant) -> Option<Result<Answer, String>> {
        let calling = self.call(variant)?;
        let answer = timeout(ATTEMPT, calling).await.unwrap_or_else(|_| Err("no answer in time".to_owned()));
        self.tell(request, &answer);
        Some(answer)
    }

    fn tell(&mut self, request: &'static str, answer: &Result<Answer, String>) {
        let told = Told::new(request, answer);
        self.proxy.say(told.to_string());
        self.told.push(told);
    }

    pub(crate) fn join(&mut self, other: Self) {
        self.finals.extend(other.finals);
        self.told.extend(other.told);
    }

    pub(crate) fn finals(&self) -> Vec<&Answer> {
        self.finals.iter().collect()
    }
}
