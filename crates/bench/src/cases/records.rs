//! Fills a table with records, as many calls would have left them.

use pg_idempotency::{Fingerprint, Key};
use sha2::{Digest as _, Sha256};
use sqlx::{Executor as _, PgConnection};

use crate::client::{BODY, spread};

const RESPONSE_BYTES: i32 = 300;

/// Completed records, whose keys are those of [`stored_key`]. Their retention ends in the order of their numbers, from
/// this many days on from now.
pub(crate) async fn store(conn: &mut PgConnection, records: u64, days: i32) -> anyhow::Result<()> {
    sqlx::query(
        "
        insert into idempotency.record (
            mode, scope, operation, value, fingerprint, token, claimed_at, completed_at, expires_at, response_body
        )
        select
            'transaction', 'account:' || (n % 5000)::text, 'POST /payments', left(encode(sha256(n::text::bytea), 'hex'), 36),
            $2, n, now(), now(), now() + (n * interval '1 day') / $1 + $4::int4 * interval '1 day',
            convert_to('\"' || left(repeat(encode(sha256(n::text::bytea), 'hex'), 5), $3::int4 - 2) || '\"', 'UTF8')
        from generate_series(1, $1::int8) as n
        ",
    )
    .bind(i64::try_from(records)?)
    .bind(Fingerprint::of_json(BODY)?.as_bytes().to_vec())
    .bind(RESPONSE_BYTES)
    .bind(days)
    .execute(&mut *conn)
    .await?;
    settle(conn).await
}

/// The key of a random one of this many records.
pub(crate) fn stored_key(call: u64, records: u64) -> anyhow::Result<Key> {
    let random = u64::from_str_radix(&spread(call)[..8], 16)?;
    let n = 1 + random % records;
    let digest = Sha256::digest(n.to_string());
    let hex: String = digest[..18].iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Key::new(format!("account:{}", n % 5000), "POST /payments", hex)?)
}

/// Does what autovacuum and the checkpointer would do, so that neither falls into one turn and not into another.
pub(crate) async fn settle(conn: &mut PgConnection) -> anyhow::Result<()> {
    conn.execute("vacuum (analyze) idempotency.record").await?;
    conn.execute("checkpoint").await?;
    Ok(())
}
