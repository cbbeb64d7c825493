//! The broker's side of a consumer: a broker that is away, a stream that was deleted, and a message without an id.

use std::process::{Command, Stdio};
use std::time::Duration;

use demos::broker::{Broker, Event, MISSING, Server};
use tokio::time::timeout;

fn server() -> anyhow::Result<Option<Server>> {
    let server = Server::start()?;
    if server.is_none() {
        println!("skipped: {MISSING}");
    }
    Ok(server)
}

#[test]
fn a_broker_that_is_away_is_named_and_fails_the_program() -> anyhow::Result<()> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let url = format!("nats://127.0.0.1:{port}");
    let mut worker = Command::new(env!("CARGO_BIN_EXE_event_consumer"));
    // The worker asks the broker first, so no database is needed.
    worker.args(["worker", "run", &url, "http://127.0.0.1:1"]).env("DATABASE_URL", "postgres://127.0.0.1:1/none");
    let mut worker = worker.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    // The worker ends with its parent when its standard input is closed.
    let _open = worker.stdin.take();
    let output = worker.wait_with_output()?;
    let error = String::from_utf8(output.stderr)?;
    assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
    assert!(error.contains(&url) && error.contains("start nats-server"), "{error}");
    Ok(())
}

#[tokio::test]
async fn a_stream_that_was_deleted_is_named_and_an_empty_one_is_not() -> anyhow::Result<()> {
    let Some(server) = server()? else { return Ok(()) };
    let consumer = Broker::connect(server.url()).await?.consumer("orders").await?;
    let waiting = timeout(Duration::from_secs(3), consumer.take(1)).await;
    assert!(waiting.is_err(), "an empty stream is no error");
    let context = async_nats::jetstream::new(async_nats::connect(server.url()).await?);
    context.delete_stream("EVENTS").await?;
    let Ok(Err(error)) = timeout(Duration::from_secs(10), consumer.take(1)).await else { panic!("the stream is gone") };
    let said = format!("{error:#}");
    let named = format!("the consumer orders of the stream EVENTS at {} does not exist any more", server.url());
    assert!(said.starts_with(&named) && said.contains("start this program again"), "{said}");
    Ok(())
}

#[tokio::test]
async fn a_message_without_an_id_is_set_aside_once_and_the_next_one_is_delivered() -> anyhow::Result<()> {
    let Some(server) = server()? else { return Ok(()) };
    let broker = Broker::connect(server.url()).await?;
    let consumer = broker.consumer("orders").await?;
    let context = async_nats::jetstream::new(async_nats::connect(server.url()).await?);
    let bad = [
        ("{}", "missing field `id`"),
        ("{\"id\": 7}", "invalid type: integer"),
        ("{\"id\": \"\"}", "its id: "),
        ("{\"id\": \"a\\nb\"}", "its id: "),
        ("no JSON", "its payload: "),
    ];
    for (number, (payload, reason)) in (1..).zip(bad) {
        context.publish("events.orders", payload.into()).await?.await?;
        broker.send("orders", &Event { id: format!("order {number}") }).await?;
        let delivered = consumer.take(10).await?;
        let ids: Vec<_> = delivered.iter().map(|delivery| &*delivery.event.id).collect();
        assert_eq!(ids, [format!("order {number}")], "{payload}");
        delivered[0].ack().await;
        let said = broker.last_reason().await?;
        assert!(
            said.starts_with("the message is not an event with an id") && said.contains(reason),
            "{payload}: {said}"
        );
        assert_eq!(broker.set_aside().await?, number);
    }
    timeout(Duration::from_secs(10), broker.handled(&["orders"])).await??;
    assert_eq!(broker.set_aside().await?, bad.len() as u64);
    Ok(())
}
