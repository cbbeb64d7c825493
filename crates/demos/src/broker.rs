//! A broker: NATS JetStream, in a process of the run. It delivers at least once: a message that a worker neither
//! acknowledges nor gives back is delivered again.

use std::process::{Command, Stdio};
use std::str;
use std::time::Duration;

use anyhow::Context as _;
use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use async_nats::jetstream::context::ConsumerInfoErrorKind;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{Config, Stream};
use async_nats::jetstream::{AckKind, Context, Message};
use async_nats::{ConnectOptions, Subject};
use futures_util::StreamExt as _;
use pg_idempotency::Key;
use rig::child::Kept;
use serde::{Deserialize, Serialize};
use tokio::time::{sleep, timeout};

/// Why a demo without a broker is skipped.
pub const MISSING: &str = "nats-server is missing; install it: sudo apt-get install nats-server";

/// The stream of the events.
const EVENTS: &str = "EVENTS";
/// The stream of the messages that no attempt can handle. A person reads it.
const POISON: &str = "POISON";
/// The header of a message in that stream which says why the message is there.
const REASON: &str = "Reason";

/// How long a worker may take before the broker delivers the message again, to this worker or to another one. It is
/// shorter than some of the work, so that the redelivery meets the first delivery.
const ACK_WAIT: Duration = Duration::from_millis(500);

/// A message that was delivered this often stays in its stream, and is not delivered again. Workers set a message aside
/// long before that.
const MAX_DELIVER: i64 = 100;

/// Between two looks for messages, and before a worker asks a broker again that did not answer.
const PAUSE: Duration = Duration::from_millis(50);

/// Far longer than a broker needs for an answer. One that is killed meanwhile gives none.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// The process of the broker. It ends when this is dropped.
pub struct Server {
    keeper: Kept,
}

impl Server {
    /// `None` if this machine has no nats-server, and no package of it: stderr has the reason.
    pub fn start() -> anyhow::Result<Option<Self>> {
        let script = |name: &str| Command::new(format!("{}/../../script/{name}", env!("CARGO_MANIFEST_DIR")));
        let found = script("find-program").arg("nats-server").stderr(Stdio::inherit()).output()?;
        if !found.status.success() {
            return Ok(None);
        }
        let program = str::from_utf8(&found.stdout)?.trim_end();
        Ok(Some(Self { keeper: Kept::start(script("nats").args(["serve", program]))? }))
    }

    pub fn url(&self) -> &str {
        &self.keeper.said
    }

    /// Kills the broker with SIGKILL. It starts again with what its files contain.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.keeper.tell("kill")
    }
}

/// A message, which is the body of its operation, the same in every delivery.
#[derive(Clone, Serialize, Deserialize)]
pub struct Event {
    /// The sender's name for the event. A sender without an answer sends the event again, and then the broker has two
    /// messages with this name.
    pub id: String,
}

impl Event {
    fn of(message: &Message) -> anyhow::Result<Self> {
        let event: Self = serde_json::from_slice(&message.payload).context("its payload")?;
        // The id becomes the value of a key.
        Key::new("events", "event", &event.id).context("its id")?;
        Ok(event)
    }
}

/// A connection to the broker. It connects again by itself.
pub struct Broker {
    url: String,
    context: Context,
    events: Stream,
    poison: Stream,
}

impl Broker {
    /// Waits for up to 10 seconds, because a broker that was killed may be on its way back.
    pub async fn connect(url: &str) -> anyhow::Result<Self> {
        Self::at(url).await.with_context(|| {
            format!(
                "the broker at {url} gives no access to the streams {EVENTS} and {POISON}; start nats-server with \
                 --jetstream there, or correct the URL"
            )
        })
    }

    async fn at(url: &str) -> anyhow::Result<Self> {
        let client = ConnectOptions::new().retry_on_initial_connect().connect(url).await?;
        let context = async_nats::jetstream::new(client);
        let events = Config { name: EVENTS.to_owned(), subjects: vec!["events.>".to_owned()], ..Config::default() };
        let poison = Config { name: POISON.to_owned(), subjects: vec!["poison.>".to_owned()], ..Config::default() };
        let (events, poison) =
            (context.get_or_create_stream(events).await?, context.get_or_create_stream(poison).await?);
        Ok(Self { url: url.to_owned(), context, events, poison })
    }

    /// Sends an event, and waits until the broker has stored it.
    pub async fn send(&self, kind: &str, event: &Event) -> anyhow::Result<()> {
        let payload = serde_json::to_vec(event)?.into();
        self.context.publish(format!("events.{kind}"), payload).await?.await?;
        Ok(())
    }

    /// The durable consumer of the events of this kind. All workers share it.
    pub async fn consumer(&self, kind: &str) -> anyhow::Result<Consumer> {
        let config = pull::Config {
            durable_name: Some(kind.to_owned()),
            filter_subject: format!("events.{kind}"),
            ack_policy: AckPolicy::Explicit,
            ack_wait: ACK_WAIT,
            max_deliver: MAX_DELIVER,
            ..pull::Config::default()
        };
        Ok(Consumer {
            consumer: self.events.get_or_create_consumer(kind, config).await?,
            context: self.context.clone(),
            name: format!("the consumer {kind} of the stream {EVENTS} at {}", self.url),
        })
    }

    /// Returns when every event of these kinds was acknowledged or set aside.
    pub async fn handled(&self, kinds: &[&str]) -> anyhow::Result<()> {
        for kind in kinds {
            // A broker that was killed does not answer until it has started again.
            while !matches!(timeout(ANSWER_LIMIT, self.left(kind)).await, Ok(Ok(0))) {
                sleep(PAUSE).await;
            }
        }
        Ok(())
    }

    async fn left(&self, kind: &str) -> anyhow::Result<u64> {
        let info =
            self.events.get_consumer::<pull::Config>(kind).await.map_err(anyhow::Error::from_boxed)?.get_info().await?;
        Ok(info.num_pending + info.num_ack_pending as u64)
    }

    /// How many events were set aside.
    pub async fn set_aside(&self) -> anyhow::Result<u64> {
        Ok(self.poison.get_info().await?.state.messages)
    }

    /// Why the last event was set aside.
    pub async fn last_reason(&self) -> anyhow::Result<String> {
        let last = self.poison.get_info().await?.state.last_sequence;
        let message = self.poison.get_raw_message(last).await?;
        Ok(message.headers.get(REASON).map(ToString::to_string).unwrap_or_default())
    }
}

/// A worker's side of a consumer.
pub struct Consumer {
    consumer: PullConsumer,
    context: Context,
    /// For a message to a person.
    name: String,
}

/// One delivery of an event.
pub struct Delivery {
    pub event: Event,
    /// How often the broker has delivered this message, this delivery included.
    pub number: i64,
    message: Message,
}

impl Consumer {
    /// Up to `most` deliveries. Waits for the first one.
    ///
    /// # Errors
    ///
    /// Returns an error if the stream or the consumer does not exist. If the broker does not answer, the call waits,
    /// because the broker may be on its way back.
    pub async fn take(&self, most: usize) -> anyhow::Result<Vec<Delivery>> {
        loop {
            match timeout(ANSWER_LIMIT, self.fetch(most)).await {
                Ok(Ok(deliveries)) if !deliveries.is_empty() => return Ok(deliveries),
                Ok(Ok(_)) => {}
                // Deliveries of a broker that was killed in the middle come again.
                Ok(Err(_)) | Err(_) => self.exists().await?,
            }
            sleep(PAUSE).await;
        }
    }

    /// Without this check, a stream that was deleted would look like a stream without messages for ever.
    async fn exists(&self) -> anyhow::Result<()> {
        match timeout(ANSWER_LIMIT, self.consumer.get_info()).await {
            Ok(Err(error))
                if matches!(error.kind(), ConsumerInfoErrorKind::NotFound | ConsumerInfoErrorKind::StreamNotFound) =>
            {
                let advice = "find out why it was deleted, and start this program again, which creates it";
                Err(error).with_context(|| format!("{} does not exist any more; {advice}", self.name))
            }
            _ => Ok(()),
        }
    }

    async fn fetch(&self, most: usize) -> anyhow::Result<Vec<Delivery>> {
        let mut messages = self.consumer.fetch().max_messages(most).messages().await?;
        let mut deliveries = Vec::new();
        while let Some(message) = messages.next().await {
            let message = message.map_err(anyhow::Error::from_boxed)?;
            let number = message.info().map_err(anyhow::Error::from_boxed)?.delivered;
            match Event::of(&message) {
                Ok(event) => deliveries.push(Delivery { event, number, message }),
                // No delivery changes this error. If the broker does not answer, the message comes again.
                Err(error) => {
                    let reason = format!("the message is not an event with an id: {error:#}");
                    if let Err(error) = self.set_message_aside(&message, &reason).await {
                        eprintln!("a message was not set aside ({reason}): {error:#}");
                    }
                }
            }
        }
        Ok(deliveries)
    }

    /// Puts the event into the stream of the poison, with the reason, and ends its deliveries.
    pub async fn set_aside(&self, delivery: &Delivery, reason: &str) -> anyhow::Result<()> {
        self.set_message_aside(&delivery.message, reason).await
    }

    /// The number of the message in the first stream is its id in the second one, so a worker that dies in between sets
    /// nothing aside twice.
    async fn set_message_aside(&self, message: &Message, reason: &str) -> anyhow::Result<()> {
        let of = message.info().map_err(anyhow::Error::from_boxed)?.stream_sequence;
        // A header is one line.
        let reason = reason.replace(['\r', '\n'], " ");
        let poison = PublishMessage::build().payload(message.payload.clone()).message_id(of.to_string());
        self.context.send_publish(Subject::from("poison.event"), poison.header(REASON, reason)).await?.await?;
        end(message, AckKind::Term).await;
        Ok(())
    }
}

impl Delivery {
    /// The event is handled, so the broker does not deliver it again. Send this only after the commit.
    pub async fn ack(&self) {
        end(&self.message, AckKind::Ack).await;
    }

    /// The broker delivers the event again after this time.
    pub async fn nack(&self, after: Duration) {
        end(&self.message, AckKind::Nak(Some(after))).await;
    }
}

/// An acknowledgement that is lost costs one more delivery, which finds what the first one has stored.
async fn end(message: &Message, kind: AckKind) {
    let _ = message.ack_with(kind).await;
}
