//! One of the alternatives that a case compares.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use sqlx::PgPool;

use crate::client::Client;

pub(crate) type Pending<'c> = Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send + 'c>>;
type Call = Arc<dyn for<'c> Fn(&'c mut Client, u64) -> Pending<'c> + Send + Sync>;

#[derive(Clone)]
pub(crate) struct Way {
    pub(crate) name: String,
    pub(crate) work: Work,
    /// What one call counts for: the keys of a batch.
    pub(crate) units: usize,
    /// Where it is another one than everybody's.
    pub(crate) database: Option<String>,
    /// The table that it fills, for the bytes that a key takes.
    pub(crate) table: Option<&'static str>,
    /// What it takes its connections from, if not from the client.
    pub(crate) pool: Option<PgPool>,
}

#[derive(Clone)]
pub(crate) enum Work {
    /// With a number that no other call of the run has.
    Call(Call),
    Pgbench {
        program: PathBuf,
        script: String,
    },
}

impl Way {
    pub(crate) fn new<F>(name: impl Into<String>, call: F) -> Self
    where
        F: for<'c> Fn(&'c mut Client, u64) -> Pending<'c> + Send + Sync + 'static,
    {
        Self::of(name, Work::Call(Arc::new(call)))
    }

    pub(crate) fn pgbench(program: PathBuf, script: String) -> Self {
        Self::of("pgbench, the same statements", Work::Pgbench { program, script })
    }

    pub(crate) async fn call(&self, client: &mut Client, call: u64) -> anyhow::Result<()> {
        match &self.work {
            Work::Call(work) => work(client, call).await,
            Work::Pgbench { .. } => anyhow::bail!("pgbench makes its calls itself"),
        }
    }

    fn of(name: impl Into<String>, work: Work) -> Self {
        Self { name: name.into(), work, units: 1, database: None, table: None, pool: None }
    }

    pub(crate) fn filling(self, table: &'static str) -> Self {
        Self { table: Some(table), ..self }
    }

    pub(crate) fn with_pool(self, pool: PgPool) -> Self {
        Self { pool: Some(pool), ..self }
    }

    pub(crate) fn of_units(self, units: usize) -> Self {
        Self { units, ..self }
    }

    pub(crate) fn on(self, database: &str) -> Self {
        Self { database: Some(database.to_owned()), ..self }
    }
}
