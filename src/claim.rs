//! How a claim is won or lost: what all modes share.

mod answer;
mod contend;
mod poll;

pub(crate) use answer::RETRY_AFTER;
pub(crate) use contend::{Claimed, Patience, claim, contend, observe_claim, select_first};
pub(crate) use poll::{Polls, jittered};
