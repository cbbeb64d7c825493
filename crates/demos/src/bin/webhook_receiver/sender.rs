//! The sender: eight at a time, and each delivery again until it is acknowledged.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use reqwest::header::RETRY_AFTER;
use serde::Deserialize;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep_until};

use crate::event::Event;
use crate::plan::Plan;
use crate::queue::Queue;
use crate::signature::{HEADER, Secret};
use crate::tally::Tally;

const TASKS: usize = 8;

/// An answer takes milliseconds. Whoever waits so long waits for something that does not come.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Where the receiver says nothing. A real sender has a schedule of minutes, then hours.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Often enough to see that it goes on.
const PROGRESS: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub(crate) struct Sender {
    url: String,
    /// One pool of connections for all clones, kept alive between deliveries.
    http: reqwest::Client,
    secret: Secret,
}

/// What the receiver has said.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: AnswerBody,
    pub(crate) latency: Duration,
    retry_after: Option<Duration>,
}

#[derive(Deserialize)]
pub(crate) struct AnswerBody {
    pub(crate) duplicate: Option<bool>,
    pub(crate) error: Option<String>,
}

impl Answer {
    /// When to deliver again, if that can help. A 4xx will be the same next time; the tally counts it as an error.
    pub(crate) fn again_after(&self) -> Option<Duration> {
        (self.status >= 500).then(|| self.retry_after.unwrap_or(AGAIN_AFTER))
    }
}

impl Sender {
    pub(crate) fn new(address: SocketAddr, secret: Secret) -> anyhow::Result<Self> {
        // A proxy for the outside world has no business between this client and 127.0.0.1.
        let http = reqwest::Client::builder().no_proxy().timeout(ANSWER_LIMIT).build()?;
        Ok(Self { url: format!("http://{address}/webhooks"), http, secret })
    }

    /// Delivers the plan, and returns what came back.
    pub(crate) async fn deliver_all(&self, plan: Arc<Plan>) -> anyhow::Result<Tally> {
        let (started, deliveries) = (Instant::now(), plan.deliveries());
        let queue = Arc::new(Mutex::new(Queue::new(plan.order.clone())));
        // One was hung up on, and is through.
        let acknowledged = Arc::new(AtomicUsize::new(1));
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            let (sender, plan, queue) = (self.clone(), plan.clone(), queue.clone());
            let acknowledged = acknowledged.clone();
            tasks.spawn(async move { sender.work(&plan, &queue, &acknowledged).await });
        }

        let mut tally = Tally::default();
        let mut progress = interval(PROGRESS);
        // The first tick is now.
        progress.tick().await;
        loop {
            tokio::select! {
                ended = tasks.join_next() => match ended {
                    Some(counted) => tally.add(counted??),
                    None => return Ok(tally),
                },
                _ = progress.tick() => {
                    let (acknowledged, seconds) = (acknowledged.load(Ordering::Relaxed), started.elapsed().as_secs_f64());
                    let pace = acknowledged as f64 / seconds;
                    println!("{seconds:5.1} s: {acknowledged} of {deliveries} acknowledged, {pace:.0} a second");
                }
            }
        }
    }

    /// One of the tasks, until nothing is left to deliver.
    async fn work(&self, plan: &Plan, queue: &Mutex<Queue>, acknowledged: &AtomicUsize) -> anyhow::Result<Tally> {
        let mut tally = Tally::default();
        loop {
            let Some((due, number)) = queue.lock().await.next() else {
                return Ok(tally);
            };
            sleep_until(due).await;
            let answer = self.deliver_event(&plan.event(number)).await?;
            tally.count(&answer);
            match answer.again_after() {
                Some(after) => queue.lock().await.again(number, after),
                None => drop(acknowledged.fetch_add(1, Ordering::Relaxed)),
            }
        }
    }

    /// Delivers once, signed anew: the signature of the first attempt would be stale by the time of the last.
    pub(crate) async fn deliver_event(&self, event: &Event) -> anyhow::Result<Answer> {
        let body = serde_json::to_vec(event)?;
        let signature = self.secret.sign(&body, SystemTime::now());
        self.deliver(body, Some(&signature)).await
    }

    /// Delivers once, whatever it is.
    pub(crate) async fn deliver(&self, body: Vec<u8>, signature: Option<&str>) -> anyhow::Result<Answer> {
        let started = Instant::now();
        let mut request = self.http.post(&self.url).header("Content-Type", "application/json").body(body);
        if let Some(signature) = signature {
            request = request.header(HEADER, signature);
        }
        let response = request.send().await.context("the receiver did not answer")?;
        let status = response.status().as_u16();
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        let retry_after = retry_after.and_then(|value| value.parse().ok()).map(Duration::from_secs);
        let body = response.json().await.context("the receiver's answer is not what it should be")?;
        Ok(Answer { status, body, latency: started.elapsed(), retry_after })
    }
}
