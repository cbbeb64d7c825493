//! The names of statements. The crate writes its own into a comment.

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
/// What the crate writes behind the first word of each statement, before its name.
const COMMENT: &str = "/* pg_idempotency: ";
/// Statements of the crate that neither read nor change what others do.
const ASIDE: &[&str] = &["schema", "applied", "leaves", "oldest due", "is open", "isolation", "is exempt"];
/// The start of a statement without such a comment, a part of it, and its name: those of callers in SQL, and the ends
/// of transactions, which are mostly sqlx's. The first that matches counts.
const NAMES: &[(&str, &str, &str)] = &[
    ("select outcome", "from idempotency.ensure(", "ensure"),
    ("select outcome", "from idempotency.run(", RUN),
    ("select idempotency.complete(", "", "complete in sql"),
    ("commit", "", "commit"),
    ("rollback to", "", ""),
    ("rollback", "", "rollback"),
];

/// Statements that never wait for another transaction.
const NEVER_WAIT: &[&str] = &[
    "claim",
    "response",
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
pub(crate) fn name(sql: &str) -> &str {
    if let Some((_, name)) = sql.split_once(COMMENT) {
        let name = name.split(" */").next().unwrap_or_default();
        return if ASIDE.contains(&name) { "" } else { name };
    }
    let plain = plain(sql);
    let named = NAMES.iter().find(|(start, part, _)| plain.starts_with(start) && plain.contains(part));
    named.map_or("", |(.., name)| name)
}

/// Whether it only ends a transaction, which matters if the transaction has a lock.
pub(crate) fn only_ends(name: &str) -> bool {
    matches!(name, "commit" | "rollback")
}

/// Whether it begins a transaction of the crate. It neither reads nor locks, so it is never held; but it has edits.
pub(crate) fn opens(name: &str) -> bool {
    name.starts_with("opening")
}

pub(crate) fn ends(name: &str) -> bool {
    only_ends(name) || name == RUN
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
