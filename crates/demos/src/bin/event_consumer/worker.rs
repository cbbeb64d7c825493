//! A worker: takes deliveries, handles them, and then acknowledges each one, gives it back, or sets its event aside.

use std::num::NonZeroU32;
use std::time::Duration;

use demos::broker::{Broker, Consumer, Delivery};
use demos::outside::{Failure, Outside, reference};
use demos::schema::Schema;
use futures_util::future::try_join3;
use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::{Error, Idempotency, Key, OnDuplicate};
use sqlx::{PgConnection, PgPool};

/// The kinds of events.
pub(crate) const VIEWS: &str = "views";
pub(crate) const ORDERS: &str = "orders";
pub(crate) const TEXTS: &str = "texts";

/// The database refuses a view or an order that begins with this.
pub(crate) const INVALID: &str = "invalid";
/// An order that ends with this takes longer than the broker waits for its acknowledgement.
pub(crate) const SLOW: &str = ", slow";

pub(crate) const TABLES: &str = "
    -- Nothing is unique in these tables: only the crate prevents a second row.
    create table page_view (event text not null check (event not like 'invalid%'));
    create table placed_order (event text not null check (event not like 'invalid%'));
    -- The deliveries of an order that met another one at work.
    create table met (event text not null, number bigint not null);
";

/// How long a text waits after the death of its worker. 40 seconds are usual. This lease has to be watched.
const LEASE: Duration = Duration::from_secs(1);

/// A killed worker counts as an attempt too, because the event may be what kills it. The broker delivers a repeat
/// before the other events, so one text may meet several of the gateway's mishaps.
const ATTEMPTS: NonZeroU32 = NonZeroU32::new(8).expect("8 is not 0");

/// A view or an order whose statement fails is set aside at this delivery.
const LAST_DELIVERY: i64 = 5;

/// The most views in one transaction.
const BATCH: usize = 50;

/// Longer than the broker can deliver an event again.
const WINDOW: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Before the next attempt of failed work.
const PAUSE: Duration = Duration::from_millis(50);

/// The three handlers, with a claim and a renewal of the lease at the same time.
const CONNECTIONS: u32 = 5;

struct Worker {
    pool: PgPool,
    /// The scope of the keys: the stream, because two streams may have events with the same name.
    stream: String,
    outside: Outside,
}

/// Ends only with an error, or with the process.
pub(crate) async fn work(schema: &Schema, arguments: &[String]) -> anyhow::Result<()> {
    let [broker, gateway] = arguments else { anyhow::bail!("a worker gets the URLs of the broker and of the gateway") };
    let broker = Broker::connect(broker).await?;
    let worker = Worker {
        pool: schema.pool(CONNECTIONS).await?,
        stream: schema.scope("events"),
        outside: Outside::new(gateway),
    };
    let (views, orders, texts) =
        (broker.consumer(VIEWS).await?, broker.consumer(ORDERS).await?, broker.consumer(TEXTS).await?);
    println!("ready");
    try_join3(worker.count_views(&views), worker.place_orders(&orders), worker.send_texts(&texts)).await?;
    Ok(())
}

impl Worker {
    /// Batches: one statement marks up to a hundred events, and one transaction has the effects of the new ones.
    async fn count_views(&self, views: &Consumer) -> anyhow::Result<()> {
        loop {
            let deliveries = views.take(BATCH).await?;
            if self.count(&deliveries).await.is_ok() {
                for delivery in &deliveries {
                    delivery.ack().await;
                }
                continue;
            }
            // One event may have failed the whole batch. Alone, it fails only itself.
            for delivery in deliveries {
                match self.count(std::slice::from_ref(&delivery)).await {
                    Ok(()) => delivery.ack().await,
                    Err(error) => self.failed(views, &delivery, &error).await,
                }
            }
        }
    }

    async fn count(&self, deliveries: &[Delivery]) -> Result<(), Error> {
        let key = |delivery: &Delivery| Key::new(&self.stream, "view.counted", &delivery.event.id);
        let keys = deliveries.iter().map(key).collect::<Result<Vec<_>, _>>()?;
        // Another worker may be at work on a redelivery of one of them: the batch then fails, and comes again.
        let marking = MarkOptions::new(WINDOW).on_duplicate(OnDuplicate::Reject);
        let mut tx = self.pool.begin().await?;
        let marked = marking.mark_many(&mut tx, &keys).await?;
        for (delivery, _) in deliveries.iter().zip(marked).filter(|(_, marked)| *marked == Marked::First) {
            insert(&mut tx, "insert into page_view (event) values ($1::text)", &delivery.event.id).await?;
        }
        pg_idempotency::commit(tx).await
    }

    /// One event at a time, whose effect and answer commit together.
    async fn place_orders(&self, orders: &Consumer) -> anyhow::Result<()> {
        let idempotency = Idempotency::new().retention(WINDOW).on_duplicate(OnDuplicate::Reject);
        loop {
            for delivery in orders.take(1).await? {
                let event = &delivery.event;
                let key = Key::new(&self.stream, "order.placed", &event.id)?;
                let placed = idempotency
                    .run(&self.pool, &key, event, async |conn| -> Result<String, Error> {
                        if event.id.ends_with(SLOW) {
                            sqlx::query("select pg_sleep(1)").execute(&mut *conn).await?;
                        }
                        insert(conn, "insert into placed_order (event) values ($1::text)", &event.id).await?;
                        Ok(event.id.clone())
                    })
                    .await;
                match placed {
                    Ok(_) => delivery.ack().await,
                    // Another delivery of this event is at work.
                    Err(Error::InFlight { retry_after, .. }) => {
                        self.note_meeting(&delivery).await?;
                        delivery.nack(retry_after).await;
                    }
                    Err(error) => self.failed(orders, &delivery, &error).await,
                }
            }
        }
    }

    /// One event at a time, whose effect is elsewhere.
    async fn send_texts(&self, texts: &Consumer) -> anyhow::Result<()> {
        let leasing = LeaseOptions::new(Policy::AtLeastOnce { lease: LEASE }).max_attempts(ATTEMPTS);
        loop {
            for delivery in texts.take(1).await? {
                let event = &delivery.event;
                let key = Key::new(&self.stream, "text.sent", &event.id)?;
                let sent = leasing
                    .run(&self.pool, &key, event, async |lease| {
                        let reference = reference(&lease.downstream_key(), lease.attempt());
                        self.outside.text(reference, &event.id).await
                    })
                    .await;
                match sent {
                    Ok(_) => delivery.ack().await,
                    // Another worker sends the text, or was killed. Unless its lease is renewed, the lease has lapsed
                    // after this time.
                    Err(Failure::Idempotency(Error::InFlight { retry_after, .. })) => delivery.nack(retry_after).await,
                    // No delivery changes these errors: the attempts are used up, or the name came with another body.
                    Err(Failure::Idempotency(error @ (Error::Exhausted { .. } | Error::KeyReused { .. }))) => {
                        self.set_aside(texts, &delivery, &error).await;
                    }
                    // The work failed, and the claim is released. Or the lease was lost, or the database failed: then
                    // another worker may have finished, and the next delivery shows that.
                    Err(_) => delivery.nack(PAUSE).await,
                }
            }
        }
    }

    /// Gives the event back, or sets it aside after too many deliveries.
    async fn failed(&self, consumer: &Consumer, delivery: &Delivery, error: &Error) {
        match error {
            Error::InFlight { retry_after, .. } => delivery.nack(*retry_after).await,
            _ if delivery.number >= LAST_DELIVERY && !error.is_transient() => {
                self.set_aside(consumer, delivery, error).await;
            }
            _ => delivery.nack(PAUSE).await,
        }
    }

    /// If the broker does not answer, the event comes again, and is set aside then.
    async fn set_aside(&self, consumer: &Consumer, delivery: &Delivery, reason: &Error) {
        if let Err(error) = consumer.set_aside(delivery, &reason.to_string()).await {
            eprintln!("{} was not set aside: {error:#}", delivery.event.id);
        }
    }

    async fn note_meeting(&self, delivery: &Delivery) -> anyhow::Result<()> {
        let mut tx = demos::schema::begin_exempt(&self.pool).await?;
        sqlx::query("insert into met (event, number) values ($1::text, $2::int8)")
            .bind(&delivery.event.id)
            .bind(delivery.number)
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }
}

async fn insert(conn: &mut PgConnection, sql: &'static str, event: &str) -> Result<(), Error> {
    sqlx::query(sql).bind(event).execute(conn).await?;
    Ok(())
}
