//! Records of a newer release, which an old process meets during a roll-out.

use std::collections::BTreeSet;
use std::time::Duration;

use pg_idempotency::lease::LeaseOptions;
use pg_idempotency::mark::{MarkOptions, mark};
use pg_idempotency::{Error, Fingerprint, Idempotency, Incompatible, Key};
use rig::cases::each;
use rig::functions;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE};
use sqlx::{PgConnection, PgPool};

use crate::support::key;

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_fingerprint_of_a_newer_version_is_not_taken_for_a_reused_key(pool: PgPool) -> anyhow::Result<()> {
    let run =
        async || Idempotency::new().run(&pool, &key("a"), "body", async |_| -> Result<i64, Error> { Ok(1) }).await;
    let _ = run().await?;
    sqlx::query("update idempotency.record set fingerprint = set_byte(fingerprint, 0, 2)").execute(&pool).await?;
    let error = run().await.expect_err("a newer version");
    assert!(matches!(error, Error::Incompatible(Incompatible::UnknownFingerprint { version: 2, .. })), "{error:?}");
    Ok(())
}

/// Records of a mode that a newer release has added, live and expired.
async fn two_of_another_mode(pool: &PgPool) -> anyhow::Result<(Key, Key)> {
    sqlx::raw_sql(
        "alter table idempotency.record drop constraint known_mode;
         insert into idempotency.record (mode, scope, operation, value, fingerprint, token, completed_at, expires_at)
         select 'newer', 'tenant', 'operation', key, '\\x0100', 1, now(), now() + expires::interval
         from (values ('live', '1 h'), ('expired', '-1 h')) as record (key, expires)",
    )
    .execute(pool)
    .await?;
    Ok((key("live"), key("expired")))
}

fn assert_unknown<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert!(
        matches!(&result, Err(Error::Incompatible(Incompatible::UnknownMode { mode, .. })) if mode == "newer"),
        "{result:?}"
    );
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_mode_of_a_newer_release_is_refused_by_name(pool: PgPool) -> anyhow::Result<()> {
    let (live, _) = two_of_another_mode(&pool).await?;
    let perform = async |_: &mut PgConnection| -> Result<i64, Error> { panic!("performed") };
    assert_unknown(Idempotency::new().run(&pool, &live, "body", perform).await);
    each([AT_LEAST_ONCE, AT_MOST_ONCE], async |policy| {
        assert_unknown(LeaseOptions::new(policy).acquire::<i64, _>(&pool, &live, "body").await.map(|_| "acquired"));
        Ok(())
    })
    .await;
    let mut tx = pool.begin().await?;
    assert_unknown(mark(&mut tx, &live, Duration::from_secs(60)).await);
    let mut tx = pool.begin().await?;
    assert_unknown(MarkOptions::new(Duration::from_secs(60)).mark_many(&mut tx, &[key("other"), live]).await);
    Ok(())
}

/// As `a_sweep_changes_no_answer` has it for the modes that are known.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn past_its_retention_a_mode_of_a_newer_release_is_as_dead_as_any(pool: PgPool) -> anyhow::Result<()> {
    let (_, expired) = two_of_another_mode(&pool).await?;
    let outcome = Idempotency::new().run(&pool, &expired, "body", async |_| -> Result<i64, Error> { Ok(1) }).await?;
    assert!(!outcome.is_replayed());
    Ok(())
}

/// The rule of `Fingerprint::compare`.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn the_sql_functions_compare_only_fingerprints_of_one_version_and_choice(pool: PgPool) -> anyhow::Result<()> {
    let version = |version: u8, rest: &[u8]| [&[version], rest, &[0; 32][rest.len()..]].concat();
    let asked = [version(1, &[]), version(2, &[]), Fingerprint::of_bytes(b"").as_bytes().to_vec()];
    let stored = [
        version(1, &[]),
        version(1, &[1]),
        version(2, &[]),
        version(2, &[0, 0, 0, 0, 0, 0, 0, 1]),
        version(2, &[0, 0, 0, 0, 0, 0, 0, 0, 1]),
        version(3, &[]),
        version(4, &[]),
        vec![2, 0],
        Fingerprint::of_bytes(b"").as_bytes().to_vec(),
    ];
    let mut outcomes = BTreeSet::new();
    for (asked, stored) in asked.iter().flat_map(|asked| stored.iter().map(move |stored| (asked, stored))) {
        let mut tx = pool.begin().await?;
        sqlx::query(
            "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, completed_at, expires_at)
             values ('transaction', 'tenant', 'operation', 'a', $1, 1, now(), 'infinity')",
        )
        .bind(stored)
        .execute(&mut *tx)
        .await?;
        let answer = functions::ensure(&mut tx, &key("a"), asked, None).await?;
        let alike = asked[0] == stored[0] && (asked[0] != 2 || asked.get(1..9) == stored.get(1..9));
        let wanted = match (asked == stored, alike) {
            (true, _) => "replayed",
            (false, true) => "key_reused",
            (false, false) => "unknown_fingerprint",
        };
        assert_eq!(answer.outcome, wanted, "{asked:?} {stored:?}");
        outcomes.insert(answer.outcome);
    }
    assert_eq!(outcomes.len(), 3);
    Ok(())
}
