//! A condition that the schema's functions and the crate's statements must share.

/// One space instead of each white space, and none inside parentheses.
fn normalised(sql: &str) -> String {
    sql.split_whitespace().collect::<Vec<_>>().join(" ").replace("( ", "(").replace(" )", ")")
}

/// PL/pgSQL cannot share the text. It has variables with the names of the columns, and asks for the mode, too.
#[test]
fn await_key_asks_whether_the_record_may_be_taken_over() {
    let migration = normalised(include_str!("../../../migrations/0001_create_record.sql"));
    let (live, retried) = (no_live_lease!(), may_be_retried!());
    let expired = format!("(expires_at <= least($6::timestamptz, pg_catalog.statement_timestamp()) and {live})");
    let condition = normalised(&format!("({expired} or (mode = $7::text and {retried}))"));
    assert!(migration.contains(&format!("if found and {condition} is not true then")), "{condition}");
}

/// `idempotency.ensure` gives the answers of `claim/answer.rs` for the same states.
#[test]
fn ensure_reads_the_state_of_a_record_as_the_crate_does() {
    let migration = normalised(include_str!("../../../migrations/any-language.sql"));
    let state = normalised(state!());
    assert!(migration.contains(&format!("{state} as state,")), "{state}");
}
