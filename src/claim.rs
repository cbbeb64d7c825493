//! How a call of any mode wins or loses a claim.

mod answer;
mod contend;

pub(crate) use answer::RETRY_AFTER;
pub(crate) use contend::{Claimed, contend};
