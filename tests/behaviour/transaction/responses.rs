//! What can be stored and comes back: sizes, characters, and types that do not survive the trip.

use std::collections::BTreeMap;

use pg_idempotency::{Error, Idempotency, Outcome};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

use crate::support::{create_effects, effects, key, leave_effect};

async fn respond<T: Serialize + DeserializeOwned>(pool: &PgPool, name: &str, response: T) -> Result<Outcome<T>, Error> {
    Idempotency::new().run(pool, &key(name), "body", async move |_| Ok::<_, Error>(response)).await
}

async fn comes_back<T: Serialize + DeserializeOwned + Clone + PartialEq + std::fmt::Debug>(
    pool: &PgPool,
    name: &str,
    response: T,
    other: T,
) {
    assert_eq!(respond(pool, name, response.clone()).await.expect("performed"), Outcome::Performed(response.clone()));
    assert_eq!(respond(pool, name, other).await.expect("replayed"), Outcome::Replayed(response));
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Answer {
    Accepted { id: u64, fee: f64, notes: BTreeMap<String, Option<String>> },
    Declined,
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_response_comes_back_as_it_was(pool: PgPool) {
    comes_back(&pool, "empty", String::new(), "other".to_owned()).await;
    comes_back(&pool, "unit", (), ()).await;
    comes_back(&pool, "NUL", "a\u{0}b \\u0000 \u{7f} \u{2028}".to_owned(), String::new()).await;
    comes_back(&pool, "10 MB", "ü".repeat(5_000_000), String::new()).await;
    comes_back(&pool, "bytes", (0..=255).collect::<Vec<u8>>(), Vec::new()).await;
    comes_back(&pool, "large integer", u64::MAX, 0).await;
    let floats: Vec<f64> = (0..10_000_u64)
        .map(|n| f64::from_bits(n.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
        .filter(|float| float.is_finite())
        .collect();
    comes_back(&pool, "floats", floats, Vec::new()).await;
    let notes = BTreeMap::from([("a".to_owned(), None), ("\"".to_owned(), Some("x".to_owned()))]);
    // The shortest digits of this float do not survive a parser that rounds twice.
    comes_back(&pool, "struct", Answer::Accepted { id: 1, fee: 5.960_464_477_539_063e-8, notes }, Answer::Declined)
        .await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_stored_bytes_are_replayed_exactly(pool: PgPool) -> anyhow::Result<()> {
    // A raw value keeps its text: white space, order, repetition.
    let text = r#"{ "b":1.10, "a" : [1e3], "a":null }"#;
    let raw = serde_json::value::RawValue::from_string(text.to_owned())?;
    assert_eq!(respond(&pool, "raw", raw.clone()).await?.into_inner().get(), text);
    assert_eq!(respond(&pool, "raw", raw).await?.into_inner().get(), text);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_type_that_no_longer_decodes_is_never_performed_again(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = respond(&pool, "a", "text".to_owned()).await?;
    for _ in 0..2 {
        let error = Idempotency::new()
            .run(&pool, &key("a"), "body", async |conn| leave_effect(conn, "second").await)
            .await
            .expect_err("no number");
        assert!(matches!(error, Error::Undecodable { .. }), "{error:?}");
        assert!(std::error::Error::source(&error).is_some());
    }
    assert_eq!(effects(&pool).await, 0);
    Ok(())
}

#[derive(Debug, Serialize, Deserialize)]
struct LosesAField {
    #[serde(skip_serializing)]
    #[allow(dead_code, reason = "read by serde alone")]
    required: String,
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_response_that_could_not_be_replayed_is_not_stored(pool: PgPool) -> anyhow::Result<()> {
    for float in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let error = respond(&pool, "a", float).await.expect_err("null is no float");
        assert!(matches!(error, Error::Unencodable { .. }), "{error:?}");
    }
    let error = respond(&pool, "a", LosesAField { required: String::new() }).await.expect_err("it does not come back");
    assert!(matches!(error, Error::Unencodable { .. }), "{error:?}");
    let error = respond(&pool, "a", BTreeMap::from([((1, 2), 3)])).await.expect_err("no string for a name");
    assert!(matches!(error, Error::Unencodable { .. }), "{error:?}");
    assert!(!respond(&pool, "a", 1).await?.is_replayed(), "nothing was stored");
    Ok(())
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Quote {
    rate: Option<f64>,
    note: Option<Option<String>>,
}

/// Each of them is `null` in JSON, or has a `null` in it, and `null` decodes as `None`. [`Error::Unencodable`]
/// documents them.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_some_that_is_null_in_json_is_replayed_as_none(pool: PgPool) -> anyhow::Result<()> {
    assert!(respond(&pool, "NaN", Some(f64::NAN)).await?.into_inner().is_some_and(f64::is_nan));
    assert_eq!(respond(&pool, "NaN", Some(1.0)).await?, Outcome::Replayed(None));
    assert_eq!(respond(&pool, "unit", Some(())).await?, Outcome::Performed(Some(())));
    assert_eq!(respond(&pool, "unit", Some(())).await?, Outcome::Replayed(None));
    assert_eq!(respond(&pool, "none", Some(None::<i32>)).await?, Outcome::Performed(Some(None)));
    assert_eq!(respond(&pool, "none", Some(Some(1))).await?, Outcome::Replayed(None));
    let quote = |rate| Quote { rate, note: Some(None) };
    let _ = respond(&pool, "fields", quote(Some(f64::INFINITY))).await?;
    let replayed = respond(&pool, "fields", quote(Some(1.0))).await?;
    assert_eq!(replayed, Outcome::Replayed(Quote { rate: None, note: None }));
    Ok(())
}
