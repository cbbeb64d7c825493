//! Round trips, counted on the wire.

use std::time::Duration;

use pg_idempotency::mark::{MarkOptions, Marked, mark};
use pg_idempotency::{Error, Idempotency, Key, Verdict, ensure_idempotent};
use rig::proxy::Proxy;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, PgConnection, PgPool};

use crate::support::{create_effects, key, leave_effect};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_option_takes_the_documented_round_trips(direct: PgPool) -> anyhow::Result<()> {
    create_effects(&direct).await;
    let proxy = Proxy::before(&direct.connect_options()).await?;
    // The pool pings a connection that comes back.
    const PINGS: usize = 2;
    let plain = Idempotency::new();
    // Of a first call and of a replay.
    let ways = [
        (plain, 5, 4),
        (plain.replay_first(true), 6, 1),
        // Prepared anew each time, each of the crate's two takes two.
        (plain.persistent(false), 7, 6),
    ];
    for (number, (way, first, replay)) in ways.into_iter().enumerate() {
        // A new one for each, because sqlx uses what it finds prepared, asked to or not.
        let pool = PgPoolOptions::new().max_connections(1).test_before_acquire(false);
        let pool = pool.connect_with(proxy.options.clone()).await?;
        // Once unmeasured: the first use of a statement prepares it.
        for measured in [false, true] {
            let key = key(&format!("{number} {measured}"));
            let mut trips = [0; 2];
            for (trips, replayed) in trips.iter_mut().zip([false, true]) {
                let held = pool.acquire().await?;
                proxy.take();
                drop(held);
                let outcome = way.run(&pool, &key, "body", async |conn| leave_effect(conn, "effect").await).await?;
                assert_eq!(outcome.is_replayed(), replayed);
                let _held = pool.acquire().await?;
                *trips = proxy.take() - PINGS;
            }
            if measured {
                assert_eq!(trips, [first, replay], "{way:?}");
            }
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_mark_takes_one_a_duplicate_two_and_a_batch_always_one(pool: PgPool) -> anyhow::Result<()> {
    let proxy = Proxy::before(&pool.connect_options()).await?;
    let mut conn = PgConnection::connect_with(&proxy.options).await?;
    let window = Duration::from_secs(300);
    let mut tx = conn.begin().await?;
    for round in 0..2 {
        let single = key(&format!("single {round}"));
        let many: Vec<Key> = (0..100).map(|n| key(&format!("{round}/{n}"))).collect();
        proxy.take();
        assert_eq!(mark(&mut tx, &single, window).await?, Marked::First);
        let first = proxy.take();
        assert_eq!(mark(&mut tx, &single, window).await?, Marked::Duplicate);
        let duplicate = proxy.take();
        assert_eq!(MarkOptions::new(window).mark_many(&mut tx, &many).await?, [Marked::First; 100]);
        let batch = proxy.take();
        assert_eq!(MarkOptions::new(window).mark_many(&mut tx, &many).await?, [Marked::Duplicate; 100]);
        let duplicates = proxy.take();
        assert_eq!(MarkOptions::new(window).mark_many(&mut tx, &[]).await?, []);
        let nothing = proxy.take();
        // The first round prepares the statements.
        if round == 1 {
            assert_eq!((first, duplicate, batch, duplicates, nothing), (1, 2, 1, 1, 0));
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_isolated_call_takes_two_more_and_an_undo_three(pool: PgPool) -> anyhow::Result<()> {
    let proxy = Proxy::before(&pool.connect_options()).await?;
    let mut conn = PgConnection::connect_with(&proxy.options).await?;
    for (round, expected) in [(0, None), (1, Some((2, 4, 5)))] {
        let keys = ["plain", "kept", "undone"].map(|name| key(&format!("{name} {round}")));
        let mut tx = conn.begin().await?;
        proxy.take();
        let plain = ensure_idempotent(&mut tx, &keys[0], "body", async |_| Ok::<_, Error>(1)).await?;
        let plain_trips = proxy.take();
        let kept = Idempotency::new()
            .ensure_isolated(&mut tx, &keys[1], "body", async |_| Ok::<_, Error>(Verdict::Keep(1)))
            .await?;
        let kept_trips = proxy.take();
        let undone = Idempotency::new()
            .ensure_isolated(&mut tx, &keys[2], "body", async |_| Ok::<_, Error>(Verdict::Undo(1)))
            .await?;
        let undone_trips = proxy.take();
        assert!(![plain, kept, undone].iter().any(pg_idempotency::Outcome::is_replayed));
        // The first round prepares the statements.
        if let Some(expected) = expected {
            assert_eq!((plain_trips, kept_trips, undone_trips), expected);
        }
        tx.commit().await?;
    }
    Ok(())
}
