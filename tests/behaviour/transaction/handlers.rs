//! Eight real handlers. What they freeze is the signature: each must compile, with `Send` where its framework asks for
//! it, and give the caller's own error back.

use std::error::Error as StdError;
use std::future::Future;
use std::pin::Pin;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::post;
use axum::{Json, Router};
use pg_idempotency::{Error, Idempotency, Key, Outcome, ensure_idempotent};
use serde::{Deserialize, Serialize};
use sqlx::{Acquire as _, PgConnection, PgPool};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Order {
    item: String,
    count: i64,
}

fn order() -> Order {
    Order { item: "tea".to_owned(), count: 2 }
}

fn key(value: &str) -> Key {
    Key::new("tenant", "order", value).expect("a valid key")
}

async fn insert(conn: &mut PgConnection, order: &Order) -> sqlx::Result<i64> {
    sqlx::query_scalar("select $1::int8").bind(order.count).fetch_one(conn).await
}

// 1. An error enum of the service's own, by thiserror.
#[derive(Debug, thiserror::Error)]
enum ShopError {
    #[error("sold out")]
    SoldOut,
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Idempotency(#[from] Error),
}

async fn with_thiserror(pool: &PgPool, order: &Order) -> Result<Outcome<i64>, ShopError> {
    let mut tx = pool.begin().await?;
    let outcome = ensure_idempotent(&mut tx, &key("thiserror"), order, async |conn| {
        if order.count == 0 {
            return Err(ShopError::SoldOut);
        }
        Ok(insert(conn, order).await?)
    })
    .await?;
    tx.commit().await?;
    Ok(outcome)
}

// 2. anyhow, which is no std::error::Error.
async fn with_anyhow(pool: &PgPool, order: &Order) -> anyhow::Result<i64> {
    let outcome = Idempotency::new()
        .run(pool, &key("anyhow"), order, async |conn| -> anyhow::Result<_> {
            let id = insert(conn, order).await?;
            anyhow::ensure!(id > 0, "nothing ordered");
            Ok(id)
        })
        .await?;
    Ok(outcome.into_inner())
}

// 3. A boxed error.
async fn with_box(conn: &mut PgConnection, order: &Order) -> Result<i64, Box<dyn StdError + Send + Sync>> {
    let outcome =
        ensure_idempotent(conn, &key("boxed"), order, async |conn| -> Result<_, Box<dyn StdError + Send + Sync>> {
            let id = insert(conn, order).await?;
            if id < 0 {
                return Err("negative".into());
            }
            Ok(id)
        })
        .await?;
    Ok(outcome.into_inner())
}

// 4. An axum handler: its future must be Send.
async fn with_axum(State(pool): State<PgPool>, Json(order): Json<Order>) -> Result<Json<i64>, Response> {
    let mut tx = pool.begin().await.map_err(Error::from)?;
    let outcome = ensure_idempotent(&mut tx, &key("axum"), &order, async |conn| -> Result<_, Error> {
        let mut savepoint = conn.begin().await?;
        let id = insert(&mut savepoint, &order).await?;
        savepoint.commit().await?;
        Ok(id)
    })
    .await?;
    tx.commit().await.map_err(Error::from)?;
    Ok(Json(outcome.into_inner()))
}

struct Response(Error);

impl From<Error> for Response {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Response {
    fn into_response(self) -> axum::response::Response {
        (StatusCode::CONFLICT, self.0.to_string()).into_response()
    }
}

// 5. tokio::spawn: Send and 'static.
async fn with_spawn(pool: PgPool, order: Order) -> Result<i64, Error> {
    tokio::spawn(async move {
        let mut performed = 0;
        let outcome = Idempotency::new()
            .run(&pool, &key("spawn"), &order, async |conn| -> Result<_, Error> {
                performed += 1;
                Ok(insert(conn, &order).await?)
            })
            .await?;
        assert!(performed <= 1);
        Ok(outcome.into_inner())
    })
    .await
    .expect("the task does not panic")
}

// 6. async_trait, which boxes as Send.
#[async_trait::async_trait]
trait Shop {
    async fn sell(&self, order: &Order) -> Result<i64, ShopError>;
}

#[async_trait::async_trait]
impl Shop for PgPool {
    async fn sell(&self, order: &Order) -> Result<i64, ShopError> {
        let mut tx = self.begin().await?;
        let outcome = ensure_idempotent(&mut tx, &key("trait"), order, async |conn| -> Result<_, ShopError> {
            Ok(insert(conn, order).await?)
        })
        .await?;
        tx.commit().await?;
        Ok(outcome.into_inner())
    }
}

// 7. A named async fn in place of a closure.
async fn sell_one(conn: &mut PgConnection) -> Result<i64, Error> {
    Ok(insert(conn, &order()).await?)
}

async fn with_named_fn(pool: &PgPool) -> Result<i64, Error> {
    let outcome = Idempotency::new().run(pool, &key("named"), &order(), sell_one).await?;
    Ok(outcome.into_inner())
}

// 8. A generic wrapper whose future must be Send: it takes a boxed future, as the docs say.
type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

fn with_wrapper<'a, T, F>(pool: &'a PgPool, order: &'a Order, perform: F) -> BoxFuture<'a, Result<Outcome<T>, Error>>
where
    T: Serialize + for<'de> Deserialize<'de> + Send + 'a,
    F: for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, Result<T, Error>> + Send + 'a,
{
    Box::pin(async move {
        Idempotency::new().run(pool, &key("wrapper"), order, async move |conn| perform(conn).await).await
    })
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn every_handler_gets_its_answer_and_its_own_error(pool: PgPool) -> anyhow::Result<()> {
    // It compiles only if the handler's future is Send.
    let _: Router = Router::new().route("/orders", post(with_axum)).with_state(pool.clone());
    let order = order();
    for replayed in [false, true] {
        assert_eq!(with_thiserror(&pool, &order).await?.is_replayed(), replayed);
        assert_eq!(with_anyhow(&pool, &order).await?, 2);
        let mut tx = pool.begin().await?;
        assert_eq!(with_box(&mut tx, &order).await.map_err(anyhow::Error::from_boxed)?, 2);
        tx.commit().await?;
        assert_eq!(with_spawn(pool.clone(), order.clone()).await?, 2);
        assert_eq!(pool.sell(&order).await?, 2);
        assert_eq!(with_named_fn(&pool).await?, 2);
        let Ok(Json(answered)) = with_axum(State(pool.clone()), Json(order.clone())).await else { panic!("answered") };
        assert_eq!(answered, 2);
        let wrapped = with_wrapper(&pool, &order, |conn| Box::pin(sell_one(conn))).await?;
        assert_eq!(wrapped.is_replayed(), replayed);
    }

    let error = with_thiserror(&pool, &Order { count: 1, ..order.clone() }).await.expect_err("another body");
    assert!(matches!(error, ShopError::Idempotency(Error::KeyReused { .. })), "{error}");
    let error = with_anyhow(&pool, &Order { count: 1, ..order.clone() }).await.expect_err("another body");
    assert!(matches!(error.downcast_ref(), Some(Error::KeyReused { .. })), "{error}");
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn an_error_of_perform_comes_back_untouched(pool: PgPool) {
    let none = Order { count: 0, ..order() };
    let error = with_thiserror(&pool, &none).await.expect_err("sold out");
    assert!(matches!(error, ShopError::SoldOut), "{error}");
    let error = with_anyhow(&pool, &none).await.expect_err("nothing ordered");
    assert_eq!(error.to_string(), "nothing ordered");
}
