//! The programs of the guide's page, on one table of keys: what one of them stored, another one replays.

use std::io::Write as _;
use std::process::Command;

use any_language::{with_diesel, with_tokio_postgres};
use diesel::sql_query;
use diesel::sql_types::{BigInt, Binary, Text};
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

/// The output of the program. `None` without psql.
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

/// The two forms of the guide's page for a parameter of bytes.
const BYTES: &str = "$2::bytea";
const STRING: &str = "convert_to($2::text, 'UTF8')";
/// gzip of `{"cents":1250}`.
const GZIP: &[u8] = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\xab\x56\x4a\x4e\xcd\x2b\x29\x56\
    \xb2\x32\x34\x32\x35\xa8\x05\x00\x51\x0a\xcd\x71\x0e\x00\x00\x00";
const TEXT: &str = r#"{"path":"C:\\dir","note":"it's \/ \u00e9 \101"}"#;

/// The claim and the completion of a key whose request is also its answer.
fn statements(form: &str) -> [String; 2] {
    [
        format!("select token from idempotency.ensure('ada', 'POST /notes', $1, idempotency.fingerprint({form}))"),
        format!("select idempotency.complete('ada', 'POST /notes', $1, $3, body => {form})"),
    ]
}

/// tokio-postgres declares no type of a parameter, and asks the server for it.
#[sqlx::test(migrator = "pg_idempotency::testing::ANY_LANGUAGE_MIGRATOR")]
async fn each_driver_stores_bytes_and_strings_as_they_were_sent(pool: PgPool) -> anyhow::Result<()> {
    let url = url(&pool);
    let (mut client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    for (value, form, sent) in [
        ("tokio-postgres bytes", BYTES, &GZIP as &(dyn tokio_postgres::types::ToSql + Sync)),
        ("tokio-postgres string", STRING, &TEXT),
    ] {
        let [ensure, complete] = statements(form);
        let tx = client.transaction().await?;
        let token: i64 = tx.query_one(&ensure, &[&value, sent]).await?.get(0);
        tx.execute(&complete, &[&value, sent, &token]).await?;
        tx.commit().await?;
    }
    diesel_stores(&url).await?;
    let stored: Vec<(String, Vec<u8>, Vec<u8>)> =
        sqlx::query_as("select value, fingerprint, response_body from idempotency.record order by value")
            .fetch_all(&pool)
            .await?;
    assert_eq!(stored.len(), 4);
    for (value, fingerprint, body) in stored {
        let sent = if value.ends_with("bytes") { GZIP } else { TEXT.as_bytes() };
        assert_eq!(body, sent, "{value}");
        assert_eq!(fingerprint, Fingerprint::of_bytes(sent).as_bytes(), "{value}");
    }
    Ok(())
}

/// diesel declares the types, because Rust has them.
async fn diesel_stores(url: &str) -> anyhow::Result<()> {
    use diesel_async::RunQueryDsl as _;

    let mut conn = AsyncPgConnection::establish(url).await?;
    conn.transaction(async |conn| {
        let [ensure, complete] = statements(BYTES);
        let ensure = sql_query(ensure).bind::<Text, _>("diesel bytes").bind::<Binary, _>(GZIP);
        let Claimed { token } = ensure.get_result(conn).await?;
        let complete = sql_query(complete).bind::<Text, _>("diesel bytes").bind::<Binary, _>(GZIP);
        complete.bind::<BigInt, _>(token).execute(conn).await?;
        let [ensure, complete] = statements(STRING);
        let ensure = sql_query(ensure).bind::<Text, _>("diesel string").bind::<Text, _>(TEXT);
        let Claimed { token } = ensure.get_result(conn).await?;
        let complete = sql_query(complete).bind::<Text, _>("diesel string").bind::<Text, _>(TEXT);
        complete.bind::<BigInt, _>(token).execute(conn).await
    })
    .await?;
    Ok(())
}

#[derive(diesel::QueryableByName)]
struct Claimed {
    #[diesel(sql_type = BigInt)]
    token: i64,
}
