//! The SQL that several statements share. Each macro is a literal for `concat!`, so a statement remains a
//! `&'static str`. (The macro calls have braces, `concat! { … }`. With parentheses rustfmt would put each part on a
//! line of its own.)

/// No owner works under a lease any more. A live lease protects its record, even past `expires_at`.
macro_rules! no_live_lease {
    () => {
        "(lease_until is null or lease_until <= pg_catalog.statement_timestamp())"
    };
}

/// A time that a client may read, or subtract another time from. **Every statement that does either with a time of the
/// table reads it through this fragment.** A person who pins a key sets `infinity`, which neither chrono nor a
/// subtraction takes; chrono ends before the largest times of PostgreSQL, too. Null stays null.
macro_rules! readable {
    ($time:literal) => {
        concat!(
            "case when ",
            $time,
            " > '9999-12-31 00:00:00+00' then '9999-12-31 00:00:00+00'::timestamptz when ",
            $time,
            " < '0001-01-01 00:00:00+00' then '0001-01-01 00:00:00+00'::timestamptz else ",
            $time,
            " end"
        )
    };
}

/// A place in the order of `expires_at`, at which a later statement goes on. Null for a time that is not [`readable`]:
/// many records may share it, and the statement that goes on must not lose them.
macro_rules! readable_place {
    ($time:literal) => {
        concat!(
            "case when ",
            $time,
            " between '0001-01-01 00:00:00+00' and '9999-12-31 00:00:00+00' then ",
            $time,
            " end"
        )
    };
}

/// Reads a time that a later statement compares or writes, also an infinite one. JSON's form of a time depends on no
/// setting but the time zone, which is UTC here. So every session writes the same text.
macro_rules! stored_time {
    ($time:literal) => {
        concat!("pg_catalog.btrim(pg_catalog.to_jsonb(", $time, " at time zone 'UTC')::text, '\"')")
    };
}

/// Stands for the steps with their results.
macro_rules! steps_hash {
    () => {
        "pg_catalog.jsonb_hash_extended(steps, 0::int8)"
    };
}

/// The names of the steps that were begun and have no result: nobody knows whether they took effect. Silent, because
/// `keyvalue` fails for what is no object, and one row that was written by hand must not stop a search.
macro_rules! steps_in_doubt {
    () => {
        "pg_catalog.jsonb_path_query_array(steps, '$.keyvalue() ? (exists (@.value.begun)).key', '{}'::jsonb, true)"
    };
}

/// The looks count: nobody has claimed, revived or settled anything since. It compares texts, because a cast would fail
/// for a row that was written by hand. An update compares with the parameter of the fence, because Citus refuses to
/// convert a time of a column there.
macro_rules! looks_count {
    () => {
        $crate::record::fragment::looks_count!(concat!("looks ->> 'lease_until'::text = ", $crate::record::fragment::stored_time!("lease_until")))
    };
    ($($lease_until_is_same:tt)+) => {
        concat! {
            "(looks ->> 'token'::text = token::text
                and ", $($lease_until_is_same)+, "
                and looks -> 'in_doubt'::text = coalesce(", $crate::record::fragment::steps_in_doubt!(), ", '[]'::jsonb))"
        }
    };
}
/// No step is in doubt. Without steps, too.
macro_rules! no_step_in_doubt {
    () => {
        "pg_catalog.jsonb_path_exists(steps, '$.*.begun') is not true"
    };
}

/// The next caller may take the unfinished record over, as its next attempt: the claim was released, or its lease has
/// lapsed and its mode repeats. Null or false otherwise.
macro_rules! may_be_retried {
    () => {
        concat! {
            "(completed_at is null
                and (lease_until = '-infinity'
                    or (lease_until <= pg_catalog.statement_timestamp() and mode in ('at_least_once', 'in_steps')))
                and ", $crate::record::fragment::no_step_in_doubt!(), ")"
        }
    };
}

/// The [`State`](crate::state::State) of a record now, in one text for every question about it. The first line that
/// matches counts, so the order has a meaning. Every claim ignores an expired record, whether or not a sweep has
/// deleted it. The last line is also for a lease of a newer release's mode. A look
/// derives the same state itself ([`Found::at`](super::tried::Found::at)): the server would prepare this for every look,
/// and on Citus a worker would judge by its own clock.
macro_rules! state {
    () => {
        concat! {
            "case
                when (expires_at <= pg_catalog.statement_timestamp()
                        and ", $crate::record::fragment::no_live_lease!(), ")
                    then 'expired'
                when completed_at is not null then case mode when 'mark' then 'mark' else 'completed' end
                when lease_until > pg_catalog.statement_timestamp() then 'in_flight'
                when ", $crate::record::fragment::may_be_retried!(), "
                    then case lease_until when '-infinity' then 'released' else 'lapsed' end
                else 'indeterminate'
            end"
        }
    };
}

/// A row of `pg_class` that is the table, or a leaf of it where the table is partitioned. Only leaves have rows.
macro_rules! table_or_leaf {
    () => {
        "(class.oid = 'idempotency.record'::regclass::oid
            or class.oid in (
                select tree.relid::oid from pg_catalog.pg_partition_tree('idempotency.record'::regclass) as tree where tree.isleaf
            ))"
    };
}

pub(super) use {
    looks_count, may_be_retried, no_live_lease, no_step_in_doubt, readable, readable_place, state, steps_hash,
    steps_in_doubt, stored_time, table_or_leaf,
};

#[cfg(test)]
#[path = "../../tests/unit/record/fragment.rs"]
mod tests;
