//! The names of statements, by their texts.

/// The statement that waits.
pub(crate) const AWAIT: &str = "await";
/// The pause before the next look at a locked row.
pub(crate) const PAUSE: &str = "pause";
/// The try of the key's lock before a claim that never began is released. It comes again until the lock is free.
pub(crate) const TRY_LOCK: &str = "try lock";
/// The release of such a claim, which is the end of its call.
pub(crate) const RELEASE_UNBEGUN: &str = "release unbegun";
/// An actor that ends a retention or a lease.
pub(crate) const MOVES_TIME: &str = "move time";
/// A claim, its effect and its completion in one statement, which commits by itself.
const RUN: &str = "run in sql";
/// The start of a statement, a part of it, and its name. The first that matches counts. No list of columns is compared,
/// so the statements may change.
const NAMES: &[(&str, &str, &str)] = &[
    ("select idempotency.claim_at_begin(", "", "claim"),
    ("select idempotency.store_response(", "", "complete and commit"),
    ("select idempotency.await_key(", "", AWAIT),
    ("select outcome", "from idempotency.ensure(", "ensure"),
    ("select outcome", "from idempotency.run(", RUN),
    ("select idempotency.complete(", "", "complete in sql"),
    ("select pg_catalog.pg_sleep", "", PAUSE),
    ("insert into idempotency.record", "", "claim"),
    ("delete from idempotency.record", "", "forget"),
    ("with deleted", "skip locked", "sweep"),
    ("with recursive", "pg_try_advisory_xact_lock", "mark batch"),
    ("with", "skip locked", "take over"),
    ("update idempotency.record set completed_at", "lease_until", "complete lease"),
    ("update idempotency.record set completed_at", "", "complete"),
    ("update idempotency.record set expires_at", "", MOVES_TIME),
    ("update idempotency.record set lease_until = least(", "", MOVES_TIME),
    ("update idempotency.record set lease_until = '-infinity'", "attempt = attempt - 1", RELEASE_UNBEGUN),
    ("update idempotency.record set lease_until = '-infinity'", "jsonb_set(", "settle step"),
    (
        "update idempotency.record set lease_until = '-infinity'",
        "claimed_at = pg_catalog.now()",
        "release in transaction",
    ),
    ("update idempotency.record set lease_until = '-infinity'", "@>", "release unperformed"),
    ("update idempotency.record set lease_until = '-infinity'", "", "release"),
    ("update idempotency.record set lease_until", "::interval,", "heartbeat"),
    ("update idempotency.record set lease_until", "", "lapse"),
    ("update idempotency.record set looks = $", "", "first visit"),
    ("update idempotency.record set looks", "", "write look"),
    ("update idempotency.record set request", "", "store request"),
    ("update idempotency.record set token", "", "ask"),
    ("update idempotency.record set steps = case", "", "retract step"),
    ("update idempotency.record set steps", "'begun'", "begin step"),
    ("update idempotency.record set steps", "", "finish step"),
    ("update idempotency.record", "", "update"),
    // The janitor's question for the oldest record decides nothing.
    ("select extract(epoch", "", ""),
    ("select 1 / (", "'exempt '", "opening exempt"),
    ("select 1 / (", "'step '", "opening durable"),
    ("select 1 / (", "; begin", "opening"),
    ("begin not deferrable", "", "opening before claim"),
    ("begin; rollback; begin isolation", "", "opening at read committed"),
    ("select", "; begin", ""),
    ("select pg_catalog.pg_try_advisory_xact_lock(", "", TRY_LOCK),
    ("select fingerprint", "", "select first"),
    ("select scope, value, fingerprint, token", "", "doubts"),
    ("select scope, value, fingerprint", "", "candidates"),
    ("select steps", "", "read steps"),
    ("select request", "", "read request"),
    ("select from idempotency.record", "", "has stored"),
    ("select", "pg_try_advisory_xact_lock", "look"),
    ("select", "from idempotency.record", "read"),
    ("commit and chain", "", "commit and chain"),
    ("commit", "", "commit"),
    ("rollback to", "", ""),
    ("rollback", "", "rollback"),
];

/// Statements that never wait for another transaction.
const NEVER_WAIT: &[&str] = &[
    "claim",
    "look",
    "take over",
    "mark batch",
    TRY_LOCK,
    "sweep",
    "select first",
    "candidates",
    "doubts",
    "read steps",
    "read request",
    "has stored",
    "read",
];

/// The name of a statement; nothing for one that neither reads nor changes what others do.
pub(crate) fn name(sql: &str) -> &'static str {
    let plain = plain(sql);
    let named = NAMES.iter().find(|(start, part, _)| plain.starts_with(start) && plain.contains(part));
    named.map_or("", |(.., name)| name)
}

/// Whether it only ends a transaction, which matters if the transaction has a lock.
pub(crate) fn only_ends(name: &str) -> bool {
    matches!(name, "commit" | "commit and chain" | "rollback")
}

/// Whether it begins a transaction of the crate. It neither reads nor locks, so it is never held; but it has edits.
pub(crate) fn opens(name: &str) -> bool {
    name.starts_with("opening")
}

pub(crate) fn ends(name: &str) -> bool {
    only_ends(name) || name == "complete and commit" || name == RUN
}

pub(crate) fn may_wait(name: &str) -> bool {
    !NEVER_WAIT.contains(&name)
}

/// The text in lower case, without comments and line breaks.
pub(crate) fn plain(sql: &str) -> String {
    let lines = sql.lines().map(|line| line.split("--").next().unwrap_or_default());
    let words: Vec<String> = lines.flat_map(str::split_whitespace).map(str::to_ascii_lowercase).collect();
    words.join(" ")
}
