//! Runs entities of SeaORM 2 on a connection on which sqlx has begun a transaction. Use the connection of `perform` or
//! of a step, or an `IdempotentTx`.

use std::sync::Arc;

use async_trait::async_trait;
use sea_orm::{ConnectionTrait, DbBackend, DbErr, ExecResult, QueryResult, RuntimeErr, Statement, Values};
use sea_query_sqlx::SqlxValues;
use sqlx::postgres::PgArguments;
use sqlx::{AssertSqlSafe, IntoArguments as _, PgConnection, Postgres};
use tokio::sync::Mutex;

/// A borrowed connection: `Entity::find().one(&OnConnection::new(conn))`.
pub struct OnConnection<'c>(Mutex<&'c mut PgConnection>);

impl<'c> OnConnection<'c> {
    /// Statements of futures that are polled together run one after another.
    pub fn new(conn: &'c mut PgConnection) -> Self {
        Self(Mutex::new(conn))
    }
}

#[async_trait]
impl ConnectionTrait for OnConnection<'_> {
    fn get_database_backend(&self) -> DbBackend {
        DbBackend::Postgres
    }

    async fn execute_raw(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        let mut conn = self.0.lock().await;
        Ok(query(statement).execute(&mut **conn).await.map_err(|error| DbErr::Exec(of_sqlx(error)))?.into())
    }

    async fn execute_unprepared(&self, sql: &str) -> Result<ExecResult, DbErr> {
        let mut conn = self.0.lock().await;
        let executed = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut **conn).await;
        Ok(executed.map_err(|error| DbErr::Exec(of_sqlx(error)))?.into())
    }

    async fn query_one_raw(&self, statement: Statement) -> Result<Option<QueryResult>, DbErr> {
        let mut conn = self.0.lock().await;
        let row = query(statement).fetch_optional(&mut **conn).await.map_err(|error| DbErr::Query(of_sqlx(error)))?;
        Ok(row.map(QueryResult::from))
    }

    async fn query_all_raw(&self, statement: Statement) -> Result<Vec<QueryResult>, DbErr> {
        let mut conn = self.0.lock().await;
        let rows = query(statement).fetch_all(&mut **conn).await.map_err(|error| DbErr::Query(of_sqlx(error)))?;
        Ok(rows.into_iter().map(QueryResult::from).collect())
    }
}

fn query(statement: Statement) -> sqlx::query::Query<'static, Postgres, PgArguments> {
    let values = statement.values.unwrap_or(Values(Vec::new()));
    sqlx::query_with(AssertSqlSafe(statement.sql), SqlxValues(values).into_arguments())
}

fn of_sqlx(error: sqlx::Error) -> RuntimeErr {
    RuntimeErr::SqlxError(Arc::new(error))
}
