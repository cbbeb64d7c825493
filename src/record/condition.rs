//! The conditions that several statements share. Each macro is a literal for `concat!`, so a statement remains a `&'static str`.
//! (`concat! { … }` has braces because rustfmt would give each part a line of its own.)

/// No owner works under a lease any more. A live lease protects its record, even past `expires_at`.
macro_rules! no_live_lease {
    () => {
        "(lease_until is null or lease_until <= pg_catalog.statement_timestamp())"
    };
}

/// The record is expired as of this moment: every claim ignores it, whether or not a sweep has deleted it.
macro_rules! expired_at {
    ($($moment:tt)+) => {
        concat!("(expires_at <= ", $($moment)+, " and ", $crate::record::condition::no_live_lease!(), ")")
    };
}

/// The record had expired when the caller first asked. The smaller time counts because the clock may have jumped back: a record
/// must not expire before its time.
macro_rules! expired_when_asked {
    ($asked:literal) => {
        $crate::record::condition::expired_at!(concat!(
            "least(",
            $asked,
            "::timestamptz, pg_catalog.statement_timestamp())"
        ))
    };
}

pub(super) use {expired_at, expired_when_asked, no_live_lease};
