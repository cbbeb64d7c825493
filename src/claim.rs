//! How a claim is won or lost: what all modes share.

mod answer;
mod contend;

pub(crate) use answer::RETRY_AFTER;
pub(crate) use contend::{Claimed, contend};
