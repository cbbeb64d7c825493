//! One of the alternatives that a case compares.

use std::pin::Pin;
use std::sync::Arc;

use crate::client::Client;

pub(crate) type Pending<'c> = Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send + 'c>>;
type Call = Arc<dyn for<'c> Fn(&'c mut Client, u64) -> Pending<'c> + Send + Sync>;

#[derive(Clone)]
pub(crate) struct Way {
    pub(crate) name: String,
    call: Call,
    /// What one call counts for: the keys of a batch.
    pub(crate) units: usize,
    /// A database of its own, if it has one.
    pub(crate) database: Option<String>,
    /// The table of keys that it fills.
    pub(crate) table: Option<&'static str>,
}

impl Way {
    pub(crate) fn new<F>(name: impl Into<String>, call: F) -> Self
    where
        F: for<'c> Fn(&'c mut Client, u64) -> Pending<'c> + Send + Sync + 'static,
    {
        Self { name: name.into(), call: Arc::new(call), units: 1, database: None, table: None }
    }

    /// The number is that of no other call of the run.
    pub(crate) async fn call(&self, client: &mut Client, number: u64) -> anyhow::Result<()> {
        (self.call)(client, number).await
    }

    pub(crate) fn filling(self, table: &'static str) -> Self {
        Self { table: Some(table), ..self }
    }

    pub(crate) fn of_units(self, units: usize) -> Self {
        Self { units, ..self }
    }

    pub(crate) fn on(self, database: &str) -> Self {
        Self { database: Some(database.to_owned()), ..self }
    }

    pub(crate) fn named(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }
}
