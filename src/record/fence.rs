//! What somebody saw of a claim before they decided about it.

/// The claim that a decision is about: its fencing token, and the end of its lease if that was read.
///
/// A machine that slept wakes, and its heartbeat revives the lapsed lease **under the same token**. So a decision that
/// took time to prepare, such as a look at the other service, needs both.
/// [`Shown::fence`](crate::operator::Shown::fence) has both. A token alone converts into a fence that accepts any
/// lapsed lease of this token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    pub(crate) token: i64,
    /// As JSON writes a time, with its zone: `-infinity` is no time of chrono.
    pub(crate) lease_until: Option<String>,
}

impl From<i64> for Fence {
    fn from(token: i64) -> Self {
        Self { token, lease_until: None }
    }
}

/// Reads `lease_until` for a [`Fence`]. JSON's form of a time depends on no setting but the time zone, which it
/// contains.
macro_rules! fence_time {
    () => {
        "pg_catalog.btrim(pg_catalog.to_jsonb(lease_until)::text, '\"')"
    };
}
pub(super) use fence_time;
