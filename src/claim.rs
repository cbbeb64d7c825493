//! How a claim is won or lost: what all modes share.

mod answer;
mod contend;
mod wait;

pub(crate) use answer::RETRY_AFTER;
pub(crate) use contend::{Claimed, contend, select_first};
pub(crate) use wait::{Patience, Polls, jittered};

use std::time::Instant;

use crate::record::Terms;
use crate::{Error, Key, observe};

/// Counts the end of a claim, with all its polls. A claim that was won is counted when its work ends.
pub(crate) fn observe_claim<W>(terms: &Terms, key: &Key, started: Instant, claimed: Result<&Claimed<W>, &Error>) {
    observe::claimed(terms.mode, key.operation(), started.elapsed());
    match claimed {
        Ok(Claimed::Won(_)) => {}
        Ok(Claimed::Replayed(_)) => observe::outcome(terms.mode, key.operation(), observe::REPLAYED),
        Err(error) => observe::failure(terms.mode, key.operation(), error),
    }
}
