//! The SQL that several statements share. Each macro is a literal for `concat!`, so a statement remains a
//! `&'static str`. (The macro calls have braces, `concat! { … }`. With parentheses rustfmt would put each part on a
//! line of its own.)

/// No owner works under a lease any more. A live lease protects its record, even past `expires_at`.
macro_rules! no_live_lease {
    () => {
        "(lease_until is null or lease_until <= pg_catalog.statement_timestamp())"
    };
}

/// The record is expired as of this moment: every claim ignores it, whether or not a sweep has deleted it.
macro_rules! expired_at {
    ($($moment:tt)+) => {
        concat!("(expires_at <= ", $($moment)+, " and ", $crate::record::fragment::no_live_lease!(), ")")
    };
}

/// The record had expired when the caller first asked. The smaller time counts because the clock may have jumped back:
/// a record must not expire before its time.
macro_rules! expired_when_asked {
    ($asked:literal) => {
        $crate::record::fragment::expired_at!(concat!(
            "least(",
            $asked,
            "::timestamptz, pg_catalog.statement_timestamp())"
        ))
    };
}

/// The names of the steps that were begun and have no result: nobody knows whether they took effect.
macro_rules! steps_in_doubt {
    () => {
        "pg_catalog.jsonb_path_query_array(steps, '$.keyvalue() ? (exists (@.value.begun)).key')"
    };
}

/// No step is in doubt. Without steps, too.
macro_rules! no_step_in_doubt {
    () => {
        "pg_catalog.jsonb_path_exists(steps, '$.*.begun') is not true"
    };
}

/// Some step is finished or in doubt. An operator may have said of all others that they took no effect.
macro_rules! has_steps {
    () => {
        "pg_catalog.jsonb_path_exists(steps, '$.* ? (exists (@.result) || exists (@.begun))') is true"
    };
}

/// An operator has settled a step since the last claim. Their statement has drawn this token, and the next claim draws
/// another.
macro_rules! settled_by_an_operator {
    () => {
        "(steps is not null and pg_catalog.jsonb_path_exists(
            steps, '$.*.settled ? (@ == $token)', pg_catalog.jsonb_build_object('token', token)
        ))"
    };
}

/// The state of a record, as operators see it. The first line that matches counts, so the order has a meaning.
macro_rules! state {
    () => {
        concat! {
            "case
                when ", $crate::record::fragment::expired_at!("pg_catalog.statement_timestamp()"), " then 'expired'
                when mode = 'mark' then 'mark'
                when completed_at is not null then 'completed'
                when lease_until > pg_catalog.statement_timestamp() then 'in_flight'
                when pg_catalog.jsonb_path_exists(steps, '$.*.begun') then 'indeterminate'
                when lease_until = '-infinity' then 'released'
                when mode in ('at_least_once', 'in_steps') then 'lapsed'
                else 'indeterminate'
            end"
        }
    };
}

/// A row of `pg_class` that is the table, or a leaf of it where the table is partitioned. Only leaves have rows.
macro_rules! table_or_leaf {
    () => {
        "(class.oid = 'idempotency.record'::regclass
            or class.oid in (
                select tree.relid from pg_catalog.pg_partition_tree('idempotency.record'::regclass) as tree where tree.isleaf
            ))"
    };
}

/// Counts rows by kind, for the janitor.
macro_rules! counts_by_kind {
    () => {
        "count(*) filter (where mode <> 'mark' and completed_at is not null) as completed,
            count(*) filter (where completed_at is null) as unfinished,
            count(*) filter (where mode = 'mark') as marks"
    };
}

pub(super) use {
    counts_by_kind, expired_at, expired_when_asked, has_steps, no_live_lease, no_step_in_doubt, settled_by_an_operator,
    state, steps_in_doubt, table_or_leaf,
};
