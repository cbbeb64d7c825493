//! Proves that one layer serves a whole API: versions (`If-Match`), PATCH, DELETE, a counter, signed requests and texts
//! under a lease each need their own place before or behind the key.
//!
//! A taxi service. [`api`] has the routes, and the order of the checks in front of them. The handlers are in
//! [`orders`], and in [`text`] the one whose effect is outside the database. This file is the story of the passengers:
//! they double-click, have two phones, and send retries that come late.

mod api;
mod orders;
mod phone;
mod text;

use std::process::ExitCode;

use demos::books::Books;
use demos::client::{Answer, client};
use demos::gate::Gate;
use demos::gateway::{Gateway, Mishap};
use demos::outside::Outside;
use demos::schema::{Schema, begin_exempt};
use demos::service::serve;
use reqwest::{Client, Method};
use sqlx::{AssertSqlSafe, PgPool};
use uuid::Uuid;

use api::BODY_LIMIT;
use orders::Service;
use phone::{Phone, ride};

fn main() -> ExitCode {
    demos::program::run("orders_api", orders::TABLES, demo)
}

struct Story<'a> {
    schema: &'a Schema,
    pool: PgPool,
    url: String,
    http: Client,
    gateway: Gateway,
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let gateway = Gateway::start().await?;
    let service = Service { pool: schema.pool(8).await?, outside: Outside::new(&gateway.url) };
    let url = serve(api::router(service)?).await?;
    let story = Story { schema, pool: schema.pool(2).await?, url, http: client(), gateway };
    story.double_click(books).await?;
    story.two_phones(books).await?;
    story.redirected(books).await?;
    story.deleted_twice(books).await?;
    story.counted(books).await?;
    story.texted(books).await?;
    story.refused_before_the_key(books).await?;
    story.revoked(books).await
}

impl Story<'_> {
    /// A new passenger, and a phone with their token.
    async fn passenger(&self, name: &str) -> sqlx::Result<Phone> {
        let (passenger, token) = (self.schema.scope(name), Uuid::new_v4().to_string());
        // The passenger is there before the first request.
        let mut tx = begin_exempt(&self.pool).await?;
        sqlx::query("insert into passenger (name, token, phone) values ($1::text, $2::text, $1::text)")
            .bind(&passenger)
            .bind(&token)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(Phone { url: self.url.clone(), http: self.http.clone(), passenger, token })
    }

    async fn count(&self, sql: &'static str, passenger: &Phone) -> sqlx::Result<i64> {
        sqlx::query_scalar(sql).bind(&passenger.passenger).fetch_one(&self.pool).await
    }

    /// The orders of this passenger, in all states.
    async fn orders(&self, passenger: &Phone) -> sqlx::Result<i64> {
        self.count("select count(*) from taxi_order where passenger = $1::text", passenger).await
    }

    async fn double_click(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("A double click: two requests at once, one key");
        let ada = self.passenger("ada").await?;
        let gate = Gate::shut(&self.pool, "taxi_order").await?;
        let first = tokio::spawn({
            let ada = ada.clone();
            async move { ada.order("click-1", "station").await }
        });
        gate.reached().await?;
        let second = ada.order("click-1", "station").await;
        books.check("the second click, while the first is in flight", &second, "409 in-flight");
        gate.open().await?;
        let first = first.await?;
        books.check("the first click", &first, "201");
        let again = ada.order("click-1", "station").await;
        books.check("the second click, once more", &again, "201 replayed");
        books.check("both get the same order", again.text == first.text, true);
        books.check("orders", self.orders(&ada).await?, 1);
        Ok(())
    }

    async fn two_phones(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("Versions: two phones of one passenger, with one view of the orders");
        let phone = self.passenger("dana").await?;
        let tablet = phone.clone();
        let seen = phone.list().await;
        books.check("a taxi, from the phone", phone.order_if(&seen, "phone-1", "opera").await, "201");
        let stale = tablet.order_if(&seen, "tablet-1", "opera").await;
        books.check("a taxi, from the tablet with its old list", stale, "412 stale-list");
        let late = phone.order_if(&seen, "phone-1", "opera").await;
        books.check("the phone's retry, whose list is older than its own order", late, "201 replayed");
        books.check("orders", self.orders(&phone).await?, 1);
        let seen = tablet.list().await;
        let second = tablet.order_if(&seen, "tablet-1", "opera").await;
        books.check("the tablet has the new list, and orders with its key", second, "201");
        books.check("orders", self.orders(&phone).await?, 2);
        Ok(())
    }

    async fn redirected(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("PATCH: a late retry must not bring an old destination back");
        let finn = self.passenger("finn").await?;
        let path = format!("/orders/{}", finn.order("finn-1", "station").await.json("id"));
        let to_zoo = finn.send(Method::PATCH, &path, "finn-2", &ride("zoo")).await;
        books.check("to the zoo", to_zoo.json("destination"), "zoo");
        let to_park = finn.send(Method::PATCH, &path, "finn-3", &ride("park")).await;
        books.check("no, to the park", to_park.json("destination"), "park");
        let late = finn.send(Method::PATCH, &path, "finn-2", &ride("zoo")).await;
        books.check("the first change, delivered again", &late, "200 replayed");
        let to_park = "select count(*) from taxi_order where passenger = $1::text and destination = 'park'";
        books.check("taxis to the park", self.count(to_park, &finn).await?, 1);
        Ok(())
    }

    async fn deleted_twice(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("DELETE twice: the same response within the retention, and the present state after it");
        let gus = self.passenger("gus").await?;
        let ordered = gus.order("gus-1", "harbour").await;
        let path = format!("/orders/{}", ordered.json("id"));
        let first = gus.send(Method::DELETE, &path, "gus-2", "").await;
        books.check("cancelled", &first, "200");
        let again = gus.send(Method::DELETE, &path, "gus-2", "").await;
        books.check("the retry", &again, "200 replayed");
        books.check("with the same bytes", again.text == first.text, true);
        books.check("with a key of its own", gus.send(Method::DELETE, &path, "gus-3", "").await, "410 cancelled");
        let late = gus.order("gus-1", "harbour").await;
        books.check("a late retry of the order, whose key outlives it", &late, "201 replayed");
        self.pass_a_day(&gus).await?;
        books.check("the retry, a day later", gus.send(Method::DELETE, &path, "gus-2", "").await, "410 cancelled");
        books.check("orders", self.orders(&gus).await?, 1);
        Ok(())
    }

    /// Moves the passenger's records into the past, beyond their retention of 24 hours.
    async fn pass_a_day(&self, passenger: &Phone) -> sqlx::Result<()> {
        let day = "interval '25 hours'";
        let sql = format!(
            "
            update idempotency.record
            set claimed_at = claimed_at - {day}, completed_at = completed_at - {day}, expires_at = expires_at - {day}
            where scope = $1::text
            "
        );
        sqlx::query(AssertSqlSafe(sql)).bind(&passenger.passenger).execute(&self.pool).await.map(drop)
    }

    async fn counted(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("A counter of rides");
        let hal = self.passenger("hal").await?;
        let path = format!("/orders/{}/complete", hal.order("hal-1", "theatre").await.json("id"));
        let rides = "select completed_rides from passenger where name = $1::text";
        let first = hal.send(Method::POST, &path, "hal-2", "").await;
        books.check("the ride is over; completed rides", first.json("completed_rides"), 1);
        let again = hal.send(Method::POST, &path, "hal-2", "").await;
        books.check("the retry", &again, "200 replayed");
        books.check("with a key of its own", hal.send(Method::POST, &path, "hal-3", "").await, "409 completed");
        books.check("completed rides", self.count(rides, &hal).await?, 1);
        Ok(())
    }

    async fn texted(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene(
            "Texts, at most once, through a gateway that is busy, and then does not say whether it has sent one",
        );
        let ida = self.passenger("ida").await?;
        let path = format!("/orders/{}/text", ida.order("order-1", "station").await.json("id"));
        let text = async |key| ida.send(Method::POST, &path, key, "").await;
        self.gateway.fail_next_texts([Mishap::Busy]);
        books.check("the text, which the gateway has surely not sent", text("text-1").await, "503 gateway-busy");
        books.check("the retry, because the key is free", text("text-1").await, "200");
        books.check("one more", text("text-1").await, "200 replayed");
        self.gateway.fail_next_texts([Mishap::NoAnswer { done: true }]);
        books.check("another text, without an answer", text("text-2").await, "502 gateway-failed");
        books.check("the retry, which an operator has to decide", text("text-2").await, "409 indeterminate");
        books.check("texts that the gateway has sent", self.gateway.texts_to(&ida.passenger), 2);
        Ok(())
    }

    /// Each of these requests also has all mistakes of the next ones, and is refused for the first.
    async fn refused_before_the_key(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("Authentication, then the size, then the signature, and only then the key");
        let lea = self.passenger("lea").await?;
        let stranger = Phone { token: "guessed".to_owned(), ..lea.clone() };
        let too_much = ride(&"x".repeat(BODY_LIMIT));
        let forged = |body: &str| lea.request(Method::POST, "/orders", "", &ride("elsewhere")).body(body.to_owned());

        let unknown = stranger.send(Method::POST, "/orders", "", &too_much).await;
        books.check("a stranger, with too large a body and no key", unknown, "401 unknown-token");
        books.check("a passenger, with the same", Answer::to(forged(&too_much)).await, "413 too-large");
        books.check("with a forged signature", Answer::to(forged(&ride("station"))).await, "403 bad-signature");
        let keyless = lea.send(Method::POST, "/orders", "", &ride("station")).await;
        books.check("with a right signature, and an empty key", keyless, "400 malformed-key");
        let keys = "select count(*) from records where scope = $1::text";
        books.check("keys that were taken", self.count(keys, &lea).await?, 0);
        books.check("orders", self.orders(&lea).await?, 0);
        Ok(())
    }

    async fn revoked(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("A replay needs a valid token too");
        let (mia, noa) = (self.passenger("mia").await?, self.passenger("noa").await?);
        books.check("a taxi to the clinic", mia.order("the-same-key", "clinic").await, "201");
        books.check("another passenger, with the same key", noa.order("the-same-key", "clinic").await, "201");
        let sql = "update passenger set revoked = true where name = $1::text";
        // Another service revokes tokens, without a key.
        let mut tx = begin_exempt(&self.pool).await?;
        sqlx::query(sql).bind(&mia.passenger).execute(&mut *tx).await?;
        tx.commit().await?;
        let again = mia.order("the-same-key", "clinic").await;
        books.check("the retry, with a revoked token", &again, "401 unknown-token");
        books.check("the refusal names the clinic", again.text.contains("clinic"), false);
        Ok(())
    }
}
