//! What was counted, and what should have been.

use std::time::Duration;

use crate::operator::Decided;
use crate::{DEATHS, TEXTS};

/// Of the [`mishaps`](crate::gateway::mishaps): workers that die, and texts that nobody heard of again, sent or not.
const KILLED: usize = 10;
const UNHEARD_SENT: usize = 7;
const UNHEARD_NOT_SENT: usize = 5;

/// How many texts were sent for each job, at several times.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) naive: Vec<usize>,
    pub(crate) naive_killed: usize,
    pub(crate) workers_done: Vec<usize>,
    pub(crate) killed: usize,
    pub(crate) decided: Decided,
    pub(crate) operator_done: Vec<usize>,
    pub(crate) asked_again: Vec<usize>,
    pub(crate) replayed: usize,
    /// From the gateway's refusal to the text.
    pub(crate) retried_after: Option<Duration>,
}

impl Tally {
    pub(crate) fn print(&self) {
        println!("\n{:<44}{:>10}{:>10}{:>10}{:>12}", "", "messages", "no text", "one text", "more texts");
        let row = |step: &str, texts: &[usize]| {
            let [never, once, more] = sorted(texts);
            println!("{step:<44}{:>10}{never:>10}{once:>10}{more:>12}", texts.len());
        };
        row("without the crate", &self.naive);
        row("at most once, until the workers are done", &self.workers_done);
        row("at most once, after the operator", &self.operator_done);
        row("at most once, all asked for once more", &self.asked_again);
        println!();
        let [naive, most] = [&self.naive, &self.asked_again].map(|texts| texts.iter().max().copied().unwrap_or(0));
        println!("texts to one customer without the crate: {naive}, after {} SIGKILLs", self.naive_killed);
        println!("texts to one customer at most once: {most}, after {} SIGKILLs", self.killed);
        println!("indeterminate: {}", self.decided.resolved + self.decided.released);
        println!("  resolved, since the gateway had sent it: {}", self.decided.resolved);
        println!("  released, since it had not: {}", self.decided.released);
        println!("replayed when asked for once more: {}", self.replayed);
        if let Some(after) = self.retried_after {
            println!("refused by the gateway, and sent {} ms later", after.as_millis());
        }
    }

    /// The counts that are not what they should be.
    pub(crate) fn wrong(&self, lease: Duration) -> Vec<String> {
        let all = TEXTS as usize;
        let mut wrong = Vec::new();
        let mut check = |what: &str, counted: usize, expected: usize| {
            if counted != expected {
                wrong.push(format!("{what}: {counted}, expected {expected}"));
            }
        };
        check("SIGKILLs without the crate", self.naive_killed, DEATHS);
        check("texts to one customer without the crate", self.naive.iter().sum(), DEATHS + 1);
        check("SIGKILLs at most once", self.killed, KILLED);
        check("resolved", self.decided.resolved, UNHEARD_SENT);
        check("released", self.decided.released, UNHEARD_NOT_SENT);
        check("replayed", self.replayed, all);
        for (when, texts, never) in [
            ("when the workers are done", &self.workers_done, UNHEARD_NOT_SENT),
            ("after the operator", &self.operator_done, 0),
            ("asked for once more", &self.asked_again, 0),
        ] {
            let [counted_never, once, more] = sorted(texts);
            check(&format!("messages without a text {when}"), counted_never, never);
            check(&format!("messages with one text {when}"), once, all - never);
            check(&format!("messages with several texts {when}"), more, 0);
        }
        match self.retried_after {
            Some(after) if after < lease => {}
            Some(after) => {
                wrong.push(format!("what was refused was sent after {after:?}, as if its lease had to lapse"))
            }
            None => wrong.push("what was refused was not sent later".to_owned()),
        }
        wrong
    }
}

/// For how many jobs no text was sent, one, and more.
fn sorted(texts: &[usize]) -> [usize; 3] {
    let count = |is: fn(usize) -> bool| texts.iter().filter(|texts| is(**texts)).count();
    [count(|texts| texts == 0), count(|texts| texts == 1), count(|texts| texts > 1)]
}
