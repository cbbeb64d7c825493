//! The rules of `migrations/strict.sql`, checked against the stored records. A test compares these rules with that
//! file.

use sqlx::{PgConnection, Row as _};

use crate::Error;

/// A rule that some records break.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) rule: String,
    pub(crate) records: u64,
    /// The scope and operation of one of them.
    pub(crate) scope: String,
    pub(crate) operation: String,
}

/// The result of one step over the table.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) broken: Vec<Broken>,
    /// The last key of the step; `None` at the end of the table.
    pub(crate) last: Option<[String; 3]>,
}

/// Checks the next `limit` records after a key, in the order of the keys.
pub(crate) async fn broken_rules(
    conn: &mut PgConnection,
    after: Option<&[String; 3]>,
    limit: i64,
) -> Result<Step, Error> {
    let [scope, operation, value] = after.map_or([""; 3], |[scope, operation, value]| [scope, operation, value]);
    let rows = sqlx::query(
        "
        with step as materialized (
            select *
            from idempotency.record
            where (scope, operation, value) > ($1::text, $2::text, $3::text)
            order by scope, operation, value
            limit $4::int8
        ),
        broken as (
            select
                rule.name,
                count(*) over (partition by rule.name) as records,
                row_number() over (partition by rule.name) as number,
                scope, operation, value
            from step
            cross join lateral (
                values
                    ('known_mode', mode in ('transaction', 'at_least_once', 'in_steps', 'at_most_once', 'mark')),
                    ('key_length', pg_catalog.octet_length(scope) between 1 and 255
                        and pg_catalog.octet_length(operation) between 1 and 255
                        and pg_catalog.octet_length(value) between 1 and 255),
                    ('fingerprint_unless_mark', (mode = 'mark') = (fingerprint is null)),
                    ('fingerprint_is_versioned', pg_catalog.octet_length(fingerprint) between 2 and 255),
                    ('attempts_count_from_one', attempt >= 1),
                    ('mark_is_complete', mode <> 'mark' or completed_at is not null),
                    ('completed_has_no_lease', completed_at is null or lease_until is null),
                    ('deadline_only_for_leases', lease_until is null
                        or mode in ('at_least_once', 'in_steps', 'at_most_once')
                        or (mode = 'transaction' and lease_until = '-infinity')),
                    ('unfinished_lease_has_a_deadline', mode not in ('at_least_once', 'in_steps', 'at_most_once')
                        or completed_at is not null or lease_until is not null),
                    ('response_only_when_completed', completed_at is not null
                        or (response_status is null and response_headers is null and response_body is null)),
                    ('steps_only_in_steps', steps is null or (mode = 'in_steps' and completed_at is null)),
                    ('request_only_to_resume', request is null
                        or (mode in ('at_least_once', 'in_steps') and completed_at is null))
            ) as rule (name, kept)
            -- As in a CHECK, null keeps the rule.
            where rule.kept is false
        )
        select name, records, scope, operation, value from broken where number = 1
        union all
        (select null, 0, scope, operation, value from step order by scope desc, operation desc, value desc limit 1)
        ",
    )
    .persistent(false)
    .bind(scope)
    .bind(operation)
    .bind(value)
    .bind(limit)
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    let mut step = Step::default();
    for row in rows {
        let (scope, operation): (String, String) = (row.try_get("scope")?, row.try_get("operation")?);
        match row.try_get("name")? {
            Some(rule) => {
                let records = row.try_get::<i64, _>("records")?.unsigned_abs();
                step.broken.push(Broken { rule, records, scope, operation });
            }
            None => step.last = Some([scope, operation, row.try_get("value")?]),
        }
    }
    Ok(step)
}
