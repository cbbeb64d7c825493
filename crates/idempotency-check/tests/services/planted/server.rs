//! `POST /payments` of a shop, with a hand-made idempotency middleware. Without a mistake it is right: the claim, the
//! payment and the exact bytes of the answer commit in one transaction.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use futures_util::StreamExt as _;
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};

use super::mistake::Mistake;

/// The usual time-out of a lock in Redis: longer than a request.
const LOCK_EXPIRES: Duration = Duration::from_secs(10);

/// After this time, a job pays: when the check has begun other tries.
const JOB: Duration = Duration::from_secs(3);

/// Each of 16 duplicates at once may hold a connection, and the mistake `WriteThroughPool` needs a second one.
const CONNECTIONS: u32 = 20;

type Key = (String, String);
type Answer = (StatusCode, Vec<u8>);

#[derive(Clone)]
struct Payment {
    amount: i64,
    currency: String,
}

/// What the store outside the database holds.
#[derive(Default)]
struct Outside {
    locks: HashMap<Key, Instant>,
    /// With the body of the request, so that another one can be refused.
    answers: HashMap<Key, (Vec<u8>, Answer)>,
}

impl Outside {
    fn answer(&self, key: &Key, body: &[u8]) -> Option<Answer> {
        let (first_body, answer) = self.answers.get(key)?;
        Some(if first_body == body { answer.clone() } else { key_reused() })
    }
}

struct Shop {
    pool: PgPool,
    mistake: Option<Mistake>,
    outside: Mutex<Outside>,
    /// With the mistakes `KeyAfterCommit` and `AnswerAfterCommit`, duplicates wait here, so that only an interruption
    /// shows the mistake.
    one_at_a_time: tokio::sync::Mutex<()>,
}

pub(crate) async fn serve(database_url: &str, port: u16, mistake: Option<Mistake>) -> anyhow::Result<()> {
    let pool = PgPoolOptions::new()
        .max_connections(CONNECTIONS)
        .acquire_timeout(Duration::from_secs(5))
        .connect(database_url)
        .await?;
    let shop =
        Arc::new(Shop { pool, mistake, outside: Mutex::default(), one_at_a_time: tokio::sync::Mutex::default() });
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let router = Router::new().route("/payments", post(pay)).with_state(shop);
    Ok(axum::serve(listener, router).await?)
}

async fn pay(State(shop): State<Arc<Shop>>, headers: HeaderMap, body: Body) -> Answer {
    let Some(body) = shop.read(body).await else {
        return (StatusCode::BAD_REQUEST, b"the body is broken".into());
    };
    if shop.makes(Mistake::BrokenBodyPerformed) || shop.makes(Mistake::DetachedAtOnce) {
        let panicked = |_| (StatusCode::INTERNAL_SERVER_ERROR, b"it panicked".into());
        return tokio::spawn(answer(shop, headers, body)).await.unwrap_or_else(panicked);
    }
    answer(shop, headers, body).await
}

async fn answer(shop: Arc<Shop>, headers: HeaderMap, body: Vec<u8>) -> Answer {
    let header = |name: &str| Some(headers.get(name)?.to_str().ok()?.to_owned());
    let (Some(user), Some(value)) = (header("x-user-id"), header("idempotency-key")) else {
        return (StatusCode::BAD_REQUEST, b"X-User-ID and Idempotency-Key are required".into());
    };
    let Some(payment) = payment(&body) else {
        return (StatusCode::BAD_REQUEST, b"amount and currency are required".into());
    };
    let key = if shop.makes(Mistake::KeyWithoutScope) { (String::new(), value) } else { (user, value) };
    let answer = match shop.mistake {
        Some(Mistake::EffectBeforeClaim) => shop.effect_before_claim(&key, &body, &payment).await,
        Some(Mistake::KeyAfterCommit) => shop.key_after_commit(&key, &body, &payment).await,
        Some(Mistake::AnswerAfterCommit) => shop.answer_after_commit(&key, &body, &payment).await,
        Some(Mistake::LockElsewhere) => shop.lock_elsewhere(&key, &body, &payment).await,
        Some(Mistake::FailureStored) => shop.failure_stored(&key, &body, &payment).await,
        Some(Mistake::ProcessingForever) => shop.processing_forever(&key, &body, &payment).await,
        _ => shop.in_one_transaction(&key, &body, &payment).await,
    };
    answer.unwrap_or_else(|error| (StatusCode::SERVICE_UNAVAILABLE, error.to_string().into()))
}

impl Shop {
    fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn outside(&self) -> MutexGuard<'_, Outside> {
        self.outside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` if the body breaks off.
    async fn read(&self, body: Body) -> Option<Vec<u8>> {
        let (mut chunks, mut read) = (body.into_data_stream(), Vec::new());
        while let Some(chunk) = chunks.next().await {
            match chunk {
                Ok(chunk) => read.extend_from_slice(&chunk),
                Err(_) if self.makes(Mistake::BrokenBodyPerformed) => break,
                Err(_) => return None,
            }
        }
        Some(read)
    }

    /// The right way, and the mistakes that change one step of it.
    async fn in_one_transaction(&self, key: &Key, body: &[u8], payment: &Payment) -> sqlx::Result<Answer> {
        if let Some(answer) = self.outside().answer(key, body) {
            return Ok(answer);
        }
        let mut tx = self.pool.begin().await?;
        // Waits while another transaction holds the key.
        if !claim(&mut tx, key, body).await? {
            let stored = self.stored(&mut tx, key, body).await?;
            if self.makes(Mistake::DuplicateEnqueued) {
                tokio::spawn(pay_later(self.pool.clone(), key.clone(), payment.clone()));
            }
            return Ok(stored.unwrap_or_else(still_processing));
        }
        let mut answer = if self.makes(Mistake::WriteThroughPool) {
            perform(&mut *self.pool.acquire().await?, key, payment).await?
        } else {
            perform(&mut tx, key, payment).await?
        };
        if self.makes(Mistake::AnswerBeforeCommit) {
            // An id would show that a lost payment was made again.
            answer.1 = format!("{{\"paid\":{}}}", payment.amount).into();
        }
        self.complete(&mut tx, key, &answer).await?;
        if self.makes(Mistake::UncommittedAnswer) {
            self.outside().answers.insert(key.clone(), (body.into(), answer.clone()));
        }
        if self.makes(Mistake::AnswerBeforeCommit) {
            tokio::spawn(tx.commit());
        } else {
            tx.commit().await?;
        }
        Ok(answer)
    }

    async fn effect_before_claim(&self, key: &Key, body: &[u8], payment: &Payment) -> sqlx::Result<Answer> {
        let mut conn = self.pool.acquire().await?;
        if let Some(stored) = self.stored(&mut conn, key, body).await? {
            return Ok(stored);
        }
        let answer = perform(&mut conn, key, payment).await?;
        claim(&mut conn, key, body).await?;
        self.complete(&mut conn, key, &answer).await?;
        Ok(answer)
    }

    async fn key_after_commit(&self, key: &Key, body: &[u8], payment: &Payment) -> sqlx::Result<Answer> {
        let _turn = self.one_at_a_time.lock().await;
        let mut tx = self.pool.begin().await?;
        if let Some(stored) = self.stored(&mut tx, key, body).await? {
            return Ok(stored);
        }
        let answer = perform(&mut tx, key, payment).await?;
        tx.commit().await?;

        let mut conn = self.pool.acquire().await?;
        claim(&mut conn, key, body).await?;
        self.complete(&mut conn, key, &answer).await?;
        Ok(answer)
    }

    async fn answer_after_commit(&self, key: &Key, body: &[u8], payment: &Payment) -> sqlx::Result<Answer> {
        let _turn = self.one_at_a_time.lock().await;
        let mut tx = self.pool.begin().await?;
        if !claim(&mut tx, key, body).await? {
            return Ok(self.stored(&mut tx, key, body).await?.unwrap_or_else(processed_before));
        }
        let answer = perform(&mut tx, key, payment).await?;
        tx.commit().await?;

        self.complete(&mut *self.pool.acquire().await?, key, &answer).await?;
        Ok(answer)
    }

    /// A failure releases the lock, because the middleware believes that nothing has happened.
    async fn lock_elsewhere(&self, key: &Key, body: &[u8], payment: &Payment) -> sqlx::Result<Answer> {
        {
            let mut outside = self.outside();
            if let Some(answer) = outside.answer(key, body) {
                return Ok(answer);
            }
            if outside.locks.get(key).is_some_and(|locked_at| locked_at.elapsed() < LOCK_EXPIRES) {
                return Ok(still_processing());
            }
            outside.locks.insert(key.clone(), Instant::now());
        }
        let performed = match self.pool.acquire().await {
            Ok(mut conn) => perform(&mut conn, key, payment).await,
            Err(error) => Err(error),
        };
        let mut outside = self.outside();
        outside.locks.remove(key);
        let answer = performed?;
        outside.answers.insert(key.clone(), (body.into(), answer.clone()));
        Ok(answer)
    }

    async fn failure_stored(&self, key: &Key, body: &[u8], payment: &Payment) -> sqlx::Result<Answer> {
        let failure = match self.in_one_transaction(key, body, payment).await {
            Ok(answer) => return Ok(answer),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string().into()),
        };
        let mut conn = self.pool.acquire().await?;
        if claim(&mut conn, key, body).await? {
            self.complete(&mut conn, key, &failure).await?;
        }
        Ok(failure)
    }

    async fn processing_forever(&self, key: &Key, body: &[u8], payment: &Payment) -> sqlx::Result<Answer> {
        let mut conn = self.pool.acquire().await?;
        if !claim(&mut conn, key, body).await? {
            let stored = self.stored(&mut conn, key, body).await?;
            return Ok(stored.unwrap_or_else(still_processing));
        }
        drop(conn);
        let mut tx = self.pool.begin().await?;
        let answer = perform(&mut tx, key, payment).await?;
        self.complete(&mut tx, key, &answer).await?;
        tx.commit().await?;
        Ok(answer)
    }

    async fn complete(&self, conn: &mut PgConnection, key: &Key, (status, body): &Answer) -> sqlx::Result<()> {
        let complete = if self.makes(Mistake::JsonbResponse) {
            "update idempotency_key set status = $3, body_as_jsonb = convert_from($4, 'UTF8'::name)::jsonb
             where scope = $1::text and value = $2::text"
        } else {
            "update idempotency_key set status = $3, body = $4 where scope = $1::text and value = $2::text"
        };
        let status = i16::try_from(status.as_u16()).unwrap_or(i16::MAX);
        sqlx::query(complete).bind(&key.0).bind(&key.1).bind(status).bind(body).execute(conn).await?;
        Ok(())
    }

    /// The stored answer of a key, or the refusal of another body. `None` while there is no answer.
    async fn stored(&self, conn: &mut PgConnection, key: &Key, body: &[u8]) -> sqlx::Result<Option<Answer>> {
        let row: Option<(bool, Option<i16>, Option<Vec<u8>>)> = sqlx::query_as(
            "select fingerprint = sha256($3::bytea), status,
                coalesce(body, convert_to(body_as_jsonb::text, 'UTF8'::name))
             from idempotency_key where scope = $1::text and value = $2::text",
        )
        .bind(&key.0)
        .bind(&key.1)
        .bind(body)
        .fetch_optional(conn)
        .await?;
        Ok(match row {
            Some((false, ..)) if !self.makes(Mistake::BodyNotCompared) => Some(key_reused()),
            Some((_, Some(status), Some(body))) => {
                let status = u16::try_from(status).ok().and_then(|status| StatusCode::from_u16(status).ok());
                Some((status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), body))
            }
            _ => None,
        })
    }
}

async fn claim(conn: &mut PgConnection, (scope, value): &Key, body: &[u8]) -> sqlx::Result<bool> {
    let claimed = sqlx::query(
        "insert into idempotency_key (scope, value, fingerprint) values ($1, $2, sha256($3::bytea))
         on conflict (scope, value) do nothing",
    );
    Ok(claimed.bind(scope).bind(value).bind(body).execute(conn).await?.rows_affected() == 1)
}

async fn perform(conn: &mut PgConnection, (_, value): &Key, payment: &Payment) -> sqlx::Result<Answer> {
    let insert = "insert into payments (amount, currency, key) values ($1, $2, $3) returning id";
    let insert = sqlx::query_scalar(insert).bind(payment.amount).bind(&payment.currency).bind(value);
    let id: i64 = insert.fetch_one(conn).await?;
    let answer = serde_json::json!({ "id": id, "amount": payment.amount, "currency": payment.currency });
    Ok((StatusCode::CREATED, answer.to_string().into()))
}

async fn pay_later(pool: PgPool, key: Key, payment: Payment) -> sqlx::Result<Answer> {
    tokio::time::sleep(JOB).await;
    perform(&mut *pool.acquire().await?, &key, &payment).await
}

fn payment(body: &[u8]) -> Option<Payment> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    Some(Payment { amount: body["amount"].as_i64()?, currency: body["currency"].as_str()?.to_owned() })
}

fn key_reused() -> Answer {
    (StatusCode::UNPROCESSABLE_ENTITY, b"this key was used with another body".into())
}

fn processed_before() -> Answer {
    (StatusCode::CREATED, br#"{"status":"processed before"}"#.into())
}

fn still_processing() -> Answer {
    (StatusCode::CONFLICT, b"a request with this key is being processed".into())
}
