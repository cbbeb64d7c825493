//! The statements on the passenger's orders.

use serde::Serialize;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

/// What the client gets, and the columns of its row.
#[derive(Serialize, sqlx::FromRow)]
pub(crate) struct Order {
    pub(crate) id: Uuid,
    pub(crate) destination: String,
    pub(crate) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub(crate) enum State {
    Ordered,
    Cancelled,
    Completed,
}

/// The version and the orders, as JSON, of one snapshot.
pub(crate) async fn list(pool: &PgPool, user: &str) -> sqlx::Result<(i64, String)> {
    let sql = "
        select
            list_version,
            (
                select coalesce(json_agg(json_build_object('id', id, 'destination', destination, 'state', state)
                    order by number), '[]')::text
                from taxi_order
                where passenger = name
            )
        from passenger
        where name = $1::text
    ";
    sqlx::query_as(sql).bind(user).fetch_one(pool).await
}

/// The version, which nobody else changes before this transaction ends.
pub(crate) async fn lock_list(conn: &mut PgConnection, user: &str) -> sqlx::Result<i64> {
    let sql = "select list_version from passenger where name = $1::text for update";
    sqlx::query_scalar(sql).bind(user).fetch_one(conn).await
}

pub(crate) async fn list_changed(conn: &mut PgConnection, user: &str) -> sqlx::Result<()> {
    let sql = "update passenger set list_version = list_version + 1 where name = $1::text";
    sqlx::query(sql).bind(user).execute(conn).await.map(drop)
}

pub(crate) async fn insert(conn: &mut PgConnection, user: &str, destination: &str) -> sqlx::Result<Order> {
    let sql = "
        insert into taxi_order (id, passenger, destination, state)
        values ($1::uuid, $2::text, $3::text, $4::text)
        returning id, destination, state
    ";
    sqlx::query_as(sql).bind(Uuid::new_v4()).bind(user).bind(destination).bind(State::Ordered).fetch_one(conn).await
}

pub(crate) async fn lock(conn: &mut PgConnection, user: &str, id: Uuid) -> sqlx::Result<Option<State>> {
    let sql = "select state from taxi_order where passenger = $1::text and id = $2::uuid for update";
    sqlx::query_scalar(sql).bind(user).bind(id).fetch_optional(conn).await
}

pub(crate) async fn redirect(conn: &mut PgConnection, id: Uuid, destination: &str) -> sqlx::Result<Order> {
    let sql = "
        update taxi_order
        set destination = $2::text
        where id = $1::uuid
        returning id, destination, state
    ";
    sqlx::query_as(sql).bind(id).bind(destination).fetch_one(conn).await
}

/// Cancelled or completed, it stays: who asks later hears what became of it.
pub(crate) async fn settle(conn: &mut PgConnection, id: Uuid, state: State) -> sqlx::Result<Order> {
    let sql = "
        update taxi_order
        set state = $2::text
        where id = $1::uuid
        returning id, destination, state
    ";
    sqlx::query_as(sql).bind(id).bind(state).fetch_one(conn).await
}

/// The counter that a repeat must not bump: nothing in it tells one ride from the next.
pub(crate) async fn count_ride(conn: &mut PgConnection, user: &str) -> sqlx::Result<i64> {
    let sql = "
        update passenger
        set completed_rides = completed_rides + 1
        where name = $1::text
        returning completed_rides
    ";
    sqlx::query_scalar(sql).bind(user).fetch_one(conn).await
}

/// Whom to text, and about which ride.
pub(crate) async fn to_text(pool: &PgPool, user: &str, id: Uuid) -> sqlx::Result<Option<(String, String)>> {
    let sql = "
        select phone, destination
        from taxi_order
        join passenger on name = passenger
        where passenger = $1::text and id = $2::uuid
    ";
    sqlx::query_as(sql).bind(user).bind(id).fetch_optional(pool).await
}
