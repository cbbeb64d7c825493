//! script/with-postgres cargo run --example reconcile
//!
//! A text that is sent at most once. The connection to the gateway breaks after the text is sent, so its outcome is
//! unknown until a reconciler asks the gateway.
//!
//! ```text
//! the gateway sends "Your car has arrived"
//! the client gets an error: the connection broke before the answer came
//! a retry is told that the outcome is unknown: true
//! the gateway finds the text, and a retry gets its receipt: text 1
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pg_idempotency::lease::{Finding, InDoubt, Lease, LeaseOptions, Policy, Reconciler};
use pg_idempotency::{Error, Key, migrate};
use sqlx::PgPool;

/// Stands for a gateway that takes no idempotency key, but lets us search for a reference of ours.
#[derive(Clone, Default)]
struct Gateway(Arc<Mutex<HashMap<String, String>>>);

impl Gateway {
    async fn send(&self, reference: &str, text: &str) -> anyhow::Result<String> {
        println!("the gateway sends {text:?}");
        let mut sent = self.0.lock().expect("not poisoned");
        let receipt = format!("text {}", sent.len() + 1);
        sent.insert(reference.to_owned(), receipt.clone());
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
    // Short times, so that the example ends soon. A lease of 40 seconds and some minutes of quiet are usual.
    let policy = Policy::AtMostOnce { lease: Duration::from_secs(2) };
    // A week for a person who settles a text without a trace. After the retention, a retry sends the text again.
    let retention = Duration::from_secs(7 * 24 * 60 * 60);
    let options = LeaseOptions::new(policy).retention(retention).store_request(true);
    let reconciler = Reconciler::new(options, "sms.arrived", Duration::from_millis(500))?;

    let key = Key::new("rides", "sms.arrived", "ride-1")?;
    let text = "Your car has arrived";
    let sending = options.run(&pool, &key, text, async |lease: &Lease| -> anyhow::Result<String> {
        gateway.send(&lease.downstream_key(), text).await?;
        anyhow::bail!("the connection broke before the answer came")
    });
    println!("the client gets an error: {:#}", sending.await.expect_err("the connection broke"));

    let retry = || options.run(&pool, &key, text, async |_| -> anyhow::Result<String> { panic!("it was sent") });
    let told = retry().await.expect_err("no reconciler runs yet");
    println!("a retry is told that the outcome is unknown: {}", is_unknown(&told));

    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let reconciling = tokio::spawn({
        let (pool, gateway) = (pool.clone(), gateway.clone());
        async move {
            let shutdown = async { drop(stopped.await) };
            let look_up = async |asked: &InDoubt| {
                Ok::<_, anyhow::Error>(match gateway.find(&asked.downstream_key).await? {
                    Some(receipt) => Finding::took_effect(&receipt)?,
                    None => Finding::NoTrace,
                })
            };
            reconciler.run(&pool, shutdown, look_up).await;
        }
    });

    let receipt = loop {
        match retry().await {
            Ok(receipt) => break receipt.into_inner(),
            Err(error) if is_unknown(&error) => tokio::time::sleep(Duration::from_millis(100)).await,
            Err(error) => return Err(error),
        }
    };
    println!("the gateway finds the text, and a retry gets its receipt: {receipt}");
    stop.send(()).expect("the reconciler runs");
    Ok(reconciling.await?)
}

fn is_unknown(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Error::Indeterminate { .. }))
}
