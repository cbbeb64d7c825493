//! A text is sent at most once, and a reconciler finds out what became of the texts whose process died.
//!
//! ```sh
//! DATABASE_URL=postgres://… cargo run --example reconcile
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pg_idempotency::lease::{Finding, InDoubt, Lease, Leasing, Policy, Reconciler};
use pg_idempotency::{Key, migrate};
use sqlx::PgPool;

/// Stands for a gateway that takes no idempotency key, but lets us search for a reference of ours.
#[derive(Clone, Default)]
struct Gateway(Arc<Mutex<HashMap<String, String>>>);

impl Gateway {
    async fn send(&self, reference: &str, text: &str) -> anyhow::Result<String> {
        let receipt = format!("receipt of {text:?}");
        self.0.lock().expect("not poisoned").insert(reference.to_owned(), receipt.clone());
        Ok(receipt)
    }

    async fn find(&self, reference: &str) -> anyhow::Result<Option<String>> {
        Ok(self.0.lock().expect("not poisoned").get(reference).cloned())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    migrate(&pool).await?;
    let gateway = Gateway::default();
    // Short times, so that the example ends soon. Usual are 40 seconds, and minutes of quiet.
    let policy = Policy::AtMostOnce { lease: Duration::from_millis(500) };
    let leasing = Leasing::new(policy)?.with_stored_request(true);
    let reconciler = Reconciler::new(leasing, "sms.arrived", Duration::from_millis(500))?;

    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let reconciling = tokio::spawn({
        let (pool, gateway) = (pool.clone(), gateway.clone());
        async move {
            let shutdown = async { drop(stopped.await) };
            let look_up = async |asked: &InDoubt| {
                Ok::<_, anyhow::Error>(match gateway.find(asked.downstream_key()).await? {
                    Some(receipt) => Finding::took_effect(&receipt)?,
                    None => Finding::NoTrace,
                })
            };
            reconciler.run(&pool, shutdown, look_up).await;
        }
    });

    let ride = format!("ride-{}", std::process::id());
    let key = Key::new("rides", "sms.arrived", &ride)?;
    let text = "Your car has arrived";
    let sending = leasing.ensure(&pool, &key, text, async |lease: &Lease| -> anyhow::Result<String> {
        gateway.send(&lease.downstream_key(), text).await?;
        anyhow::bail!("the connection broke before the answer came")
    });
    println!("the first call: {:#}", sending.await.expect_err("nobody knows whether the text was sent"));

    loop {
        let again = leasing.ensure(&pool, &key, text, async |_| -> anyhow::Result<String> { panic!("it was sent") });
        match again.await {
            Ok(receipt) => break println!("a retry: {}", receipt.into_inner()),
            Err(error) => println!("a retry: {error:#}"),
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    stop.send(()).expect("the reconciler runs");
    Ok(reconciling.await?)
}
