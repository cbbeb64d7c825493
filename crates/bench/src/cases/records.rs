//! Records by the thousand, as calls would have left them.

use pg_idempotency::{Fingerprint, Key};
use sha2::{Digest as _, Sha256};
use sqlx::{Executor as _, PgConnection};

use crate::client::{BODY, spread};

/// How many bytes of response a record has.
const RESPONSE_BYTES: i32 = 300;

/// Completed records, the keys those of [`stored_key`]; and the same for the usual hand-written code.
pub(crate) async fn store(conn: &mut PgConnection, records: u64) -> anyhow::Result<()> {
    sqlx::query(
        "
        insert into idempotency.record (
            mode, scope, operation, value, fingerprint, token, claimed_at, completed_at, expires_at, response_body
        )
        select
            'transaction', 'account:' || n % 5000, 'POST /payments', left(encode(sha256(n::text::bytea), 'hex'), 36),
            $2, n, now(), now(), now() + n * interval '1 day' / $1 + interval '1 day',
            convert_to('\"' || left(repeat(encode(sha256(n::text::bytea), 'hex'), 5), $3::int4 - 2) || '\"', 'UTF8')
        from generate_series(1, $1::int8) as n
        ",
    )
    .bind(i64::try_from(records)?)
    .bind(Fingerprint::of_json(BODY)?.as_bytes().to_vec())
    .bind(RESPONSE_BYTES)
    .execute(&mut *conn)
    .await?;
    settle(conn).await
}

/// Operations in steps whose callers never come back.
pub(crate) async fn store_abandoned(conn: &mut PgConnection, records: u64) -> anyhow::Result<()> {
    sqlx::query(
        "
        insert into idempotency.record (
            mode, scope, operation, value, fingerprint, token, claimed_at, lease_until, expires_at, request
        )
        select
            'in_steps', 'account:' || n % 5000, 'POST /payments', gen_random_uuid(), $2, n,
            now() - interval '1 hour', now() - interval '1 min', now() + interval '1 day', convert_to($3, 'UTF8')
        from generate_series(1, $1::int8) as n
        ",
    )
    .bind(i64::try_from(records)?)
    .bind(Fingerprint::of_json(BODY)?.as_bytes().to_vec())
    .bind(serde_json::to_string(BODY)?)
    .execute(&mut *conn)
    .await?;
    settle(conn).await
}

/// One of this many, each as likely.
pub(crate) fn stored_key(call: u64, records: u64) -> anyhow::Result<Key> {
    let random = u64::from_str_radix(&spread(call)[..8], 16)?;
    let n = 1 + random % records;
    let digest = Sha256::digest(n.to_string());
    let hex: String = digest[..18].iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Key::new(format!("account:{}", n % 5000), "POST /payments", hex)?)
}

/// Records as they are a day later: in the order of their time, a mark among ten, one in a hundred left unfinished by a
/// lease that has lapsed, and the keys random, as UUIDs are.
pub(crate) async fn store_expired(conn: &mut PgConnection, records: u64) -> anyhow::Result<()> {
    sqlx::query(
        "
        insert into idempotency.record (
            mode, scope, operation, value, fingerprint, token, claimed_at, lease_until, completed_at, expires_at,
            response_status, response_body
        )
        select
            mode, 'account:' || n % 5000, 'POST /payments', gen_random_uuid(),
            case when mode <> 'mark' then '\\x01'::bytea || sha256(n::text::bytea) end,
            n, at, case when mode = 'at_least_once' then at + interval '1 min' end,
            case when mode <> 'at_least_once' then at end, at + interval '1 day',
            case when mode = 'transaction' then 201 end,
            case when mode = 'transaction' then convert_to(rpad(n::text, $2::int4, 'response '), 'UTF8') end
        from (
            select
                n, now() - interval '2 days' + n * (interval '12 hours' / $1) as at,
                case when n % 10 = 0 then 'mark' when n % 100 = 1 then 'at_least_once' else 'transaction' end as mode
            from generate_series(1, $1::int8) as n
        ) as record
        ",
    )
    .bind(i64::try_from(records)?)
    .bind(RESPONSE_BYTES)
    .execute(&mut *conn)
    .await?;
    settle(conn).await
}

/// What autovacuum and the checkpointer would do in time, so that neither falls into one slice and not into another.
pub(crate) async fn settle(conn: &mut PgConnection) -> anyhow::Result<()> {
    conn.execute("vacuum (analyze) idempotency.record").await?;
    conn.execute("checkpoint").await?;
    Ok(())
}
