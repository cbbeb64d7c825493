//! The script: what can come between a client and a payment, one step after the other.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::api::Api;
use crate::client::Client;
use crate::storm::storm;
use crate::tally::{Counts, Tally};

/// What the slow processes take: enough to be hit in the middle on a busy machine, and below the 5 seconds that a retry
/// waits for a request in flight.
const SLOW: Duration = Duration::from_secs(2);
const FAST: Duration = Duration::ZERO;

pub(crate) async fn run(client: &Client, steps: &mut Vec<Tally>) -> anyhow::Result<()> {
    let fast = Api::start(FAST).await?;
    steps.push(storm(client, &fast.url).await?);
    steps.push(retries(client, &fast.url).await?);
    steps.push(another_body(client, &fast.url).await?);
    steps.push(two_users(client, &fast.url).await?);

    let slow = Api::start(SLOW).await?;
    steps.push(hang_up(client, &slow.url).await?);
    steps.push(killed_in_the_middle(client, slow).await?);
    steps.push(killed_after_the_answer(client).await?);
    steps.push(drained(client, &fast.url).await?);
    steps.push(drained_after_a_hang_up(client, &fast.url).await?);

    fast.terminate().await?;
    fast.ended().await
}

async fn retries(client: &Client, url: &str) -> anyhow::Result<Tally> {
    let expected = Counts { requests: 20, performed: 1, replayed: 19, payments: 1, ..Counts::default() };
    let mut tally = Tally::begin("retries, one by one", expected);
    let intent = client.intent("ada");
    for _ in 0..20 {
        tally.count(&intent, client.ask(url, &intent).await);
    }
    tally.counted.payments = client.payments(&[intent]).await?;
    Ok(tally)
}

async fn another_body(client: &Client, url: &str) -> anyhow::Result<Tally> {
    let refused = BTreeMap::from([(422, 1)]);
    let expected = Counts { requests: 3, performed: 1, replayed: 1, refused, payments: 1, ..Counts::default() };
    let mut tally = Tally::begin("another body under a used key", expected);
    let intent = client.intent("ada");
    let mut dearer = intent.clone();
    dearer.body = r#"{"amount":9999,"currency":"EUR","customer_id":"c-17"}"#.to_owned();
    for intent in [&intent, &dearer, &intent] {
        tally.count(intent, client.ask(url, intent).await);
    }
    tally.counted.payments = client.payments(&[intent]).await?;
    Ok(tally)
}

async fn two_users(client: &Client, url: &str) -> anyhow::Result<Tally> {
    let expected = Counts { requests: 4, performed: 2, replayed: 2, payments: 2, ..Counts::default() };
    let mut tally = Tally::begin("one key, two users", expected);
    let adas = client.intent("ada");
    let mut bobs = client.intent("bob");
    bobs.key.clone_from(&adas.key);
    for intent in [&adas, &bobs, &adas, &bobs] {
        tally.count(intent, client.ask(url, intent).await);
    }
    if let (Some(hers), Some(his)) = (tally.answers.get(&adas), tally.answers.get(&bobs))
        && hers == his
    {
        tally.count_error("two users got one answer".to_owned());
    }
    tally.counted.payments = client.payments(&[adas, bobs]).await?;
    Ok(tally)
}

/// The run goes on without its client, so that the retry finds the answer.
async fn hang_up(client: &Client, url: &str) -> anyhow::Result<Tally> {
    let expected = Counts { requests: 2, unanswered: 1, replayed: 1, payments: 1, ..Counts::default() };
    let mut tally = Tally::begin("hang-up in the middle, then a retry", expected);
    let intent = client.intent("ada");

    let connection = client.send_only(url, &intent).await?;
    client.in_the_middle().await?;
    drop(connection);
    tally.count_unanswered();

    tally.count(&intent, client.ask(url, &intent).await);
    tally.counted.payments = client.payments(&[intent]).await?;
    Ok(tally)
}

/// The retry waits until PostgreSQL has noticed that the other end is gone and has rolled back, and then performs.
async fn killed_in_the_middle(client: &Client, api: Api) -> anyhow::Result<Tally> {
    let expected = Counts { requests: 2, unanswered: 1, performed: 1, payments: 1, ..Counts::default() };
    let mut tally = Tally::begin("SIGKILL in the middle, then a retry", expected);
    let intent = client.intent("ada");

    let url = api.url.clone();
    let kill = async {
        client.in_the_middle().await?;
        api.kill().await
    };
    let (answer, killed) = tokio::join!(client.ask(&url, &intent), kill);
    killed?;
    match answer {
        Err(_) => tally.count_unanswered(),
        Ok(answer) => tally.count(&intent, Ok(answer)),
    }

    let restarted = Api::start(FAST).await?;
    tally.count(&intent, client.ask(&restarted.url, &intent).await);
    tally.counted.payments = client.payments(&[intent]).await?;
    Ok(tally)
}

async fn killed_after_the_answer(client: &Client) -> anyhow::Result<Tally> {
    let expected = Counts { requests: 2, performed: 1, replayed: 1, payments: 1, ..Counts::default() };
    let mut tally = Tally::begin("SIGKILL after the answer, then a retry", expected);
    let intent = client.intent("ada");

    let api = Api::start(FAST).await?;
    tally.count(&intent, client.ask(&api.url, &intent).await);
    api.kill().await?;

    let restarted = Api::start(FAST).await?;
    tally.count(&intent, client.ask(&restarted.url, &intent).await);
    tally.counted.payments = client.payments(&[intent]).await?;
    Ok(tally)
}

async fn drained(client: &Client, elsewhere: &str) -> anyhow::Result<Tally> {
    let expected = Counts { requests: 2, performed: 1, replayed: 1, payments: 1, ..Counts::default() };
    let mut tally = Tally::begin("SIGTERM in the middle, then a retry", expected);
    let intent = client.intent("ada");

    let api = Api::start(SLOW).await?;
    let terminate = async {
        client.in_the_middle().await?;
        api.terminate().await
    };
    let (answer, terminated) = tokio::join!(client.ask(&api.url, &intent), terminate);
    terminated?;
    tally.count(&intent, answer);
    api.ended().await?;

    tally.count(&intent, client.ask(elsewhere, &intent).await);
    tally.counted.payments = client.payments(&[intent]).await?;
    Ok(tally)
}

/// No connection is left to wait for, and yet the process has to wait.
async fn drained_after_a_hang_up(client: &Client, elsewhere: &str) -> anyhow::Result<Tally> {
    let expected = Counts { requests: 2, unanswered: 1, replayed: 1, payments: 1, ..Counts::default() };
    let mut tally = Tally::begin("hang-up and SIGTERM, then a retry", expected);
    let intent = client.intent("ada");

    let api = Api::start(SLOW).await?;
    let connection = client.send_only(&api.url, &intent).await?;
    client.in_the_middle().await?;
    drop(connection);
    tally.count_unanswered();
    api.terminate().await?;
    api.ended().await?;

    tally.count(&intent, client.ask(elsewhere, &intent).await);
    tally.counted.payments = client.payments(&[intent]).await?;
    Ok(tally)
}
