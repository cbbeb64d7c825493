//! The programs of the guide's page, on one table of keys: what one of them stored, another one replays.

use std::io::Write as _;
use std::process::Command;

use any_language::{with_diesel, with_tokio_postgres};
use diesel_async::{AsyncConnection as _, AsyncPgConnection};
use pg_idempotency::{Fingerprint, Key, ensure_idempotent};
use sqlx::{ConnectOptions as _, PgPool};

type Paid = (i32, String);

fn url(pool: &PgPool) -> String {
    let options = pool.connect_options();
    let mut url = options.to_url_lossy();
    // Without the parameters of sqlx.
    let socket = options.get_socket().map(|socket| format!("host={}", socket.display()));
    url.set_query(socket.as_deref());
    url.to_string()
}

async fn by_tokio_postgres(url: &str, key: &str, cents: i64) -> anyhow::Result<Paid> {
    let (mut client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    let (status, body) = with_tokio_postgres::pay(&mut client, "ada", key, cents).await?;
    Ok((status, String::from_utf8(body)?))
}

async fn by_diesel(url: &str, key: &str, cents: i64) -> anyhow::Result<Paid> {
    let mut conn = AsyncPgConnection::establish(url).await?;
    let (status, body) = with_diesel::pay(&mut conn, "ada", key, cents).await?;
    Ok((status, String::from_utf8(body)?))
}

/// What the program prints. `None` where there is no psql.
fn by_psql(url: &str, key: &str, cents: i64) -> Option<String> {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/../../src/guide/any_language/pay.sql");
    let variables = ["user=ada".to_owned(), format!("key={key}"), format!("cents={cents}")];
    let mut command = Command::new("psql");
    command.args(["-qAtX", "-v", "ON_ERROR_STOP=1", "-f", program]).arg(url);
    let output = command.args(variables.iter().flat_map(|one| ["-v", one])).output().ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

async fn payments(pool: &PgPool) -> anyhow::Result<i64> {
    Ok(sqlx::query_scalar("select count(*) from payments").fetch_one(pool).await?)
}

async fn create_payments(pool: &PgPool) -> anyhow::Result<()> {
    sqlx::raw_sql("create table payments (id bigint generated always as identity, payer text, cents bigint)")
        .execute(pool)
        .await?;
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::testing::ANY_LANGUAGE_MIGRATOR")]
async fn each_driver_performs_once_and_replays_what_the_others_stored(pool: PgPool) -> anyhow::Result<()> {
    create_payments(&pool).await?;
    let url = url(&pool);
    let reused = (422, "this key was used for another payment".to_owned());
    let one = (201, r#"{"id":1}"#.to_owned());
    assert_eq!(by_tokio_postgres(&url, "key-1", 1250).await?, one);
    assert_eq!(by_diesel(&url, "key-1", 1250).await?, one);
    assert_eq!(by_tokio_postgres(&url, "key-1", 1251).await?, reused);
    let two = (201, r#"{"id":2}"#.to_owned());
    assert_eq!(by_diesel(&url, "key-2", 1250).await?, two);
    assert_eq!(by_tokio_postgres(&url, "key-2", 1250).await?, two);
    assert_eq!(by_diesel(&url, "key-2", 1251).await?, reused);
    match by_psql(&url, "key-2", 1250) {
        Some(printed) => {
            assert_eq!(printed, r#"replayed 201 {"id":2}"#);
            assert_eq!(by_psql(&url, "key-2", 1251).as_deref(), Some("key_reused"));
            assert_eq!(by_psql(&url, "key-3", 7).as_deref(), Some(r#"claimed 201 {"id":3}"#));
            assert_eq!(by_diesel(&url, "key-3", 7).await?, (201, r#"{"id":3}"#.to_owned()));
        }
        None => {
            by_diesel(&url, "key-3", 7).await?;
            writeln!(std::io::stderr(), "skipped: there is no psql")?;
        }
    }
    // Two at once.
    let (a, b) = tokio::join!(by_diesel(&url, "key-4", 1), by_tokio_postgres(&url, "key-4", 1));
    assert_eq!((a?, payments(&pool).await?), (b?, 4));
    // The Rust library.
    let mut tx = pool.begin().await?;
    let fingerprint = Fingerprint::of_bytes(b"POST /payments\n1250");
    let key = Key::new("ada", "POST /payments", "key-1")?;
    let replayed = ensure_idempotent(
        &mut tx,
        &key,
        &fingerprint,
        async |_| -> anyhow::Result<std::collections::BTreeMap<String, i64>> { anyhow::bail!("performed") },
    )
    .await?;
    assert!(replayed.is_replayed() && replayed.into_inner()["id"] == 1);
    Ok(())
}

/// A payment that fails undoes its claim, and a retry pays.
#[sqlx::test(migrator = "pg_idempotency::testing::ANY_LANGUAGE_MIGRATOR")]
async fn each_driver_rolls_the_claim_back_with_the_payment(pool: PgPool) -> anyhow::Result<()> {
    let url = url(&pool);
    assert!(by_tokio_postgres(&url, "key-1", 1).await.is_err(), "there is no table of payments yet");
    assert!(by_diesel(&url, "key-1", 1).await.is_err());
    create_payments(&pool).await?;
    let paid = by_tokio_postgres(&url, "key-1", 1).await?;
    assert_eq!((by_diesel(&url, "key-1", 1).await?, payments(&pool).await?), (paid, 1));
    Ok(())
}
