//! Very many requests at once, half of them over each transport, all with one nonce.

use tokio::task::JoinSet;

use crate::CONNECTIONS;
use crate::client::Client;
use crate::client::Transport::{Http, Socket};
use crate::steps::enforced;
use crate::tally::{Counts, Tally};

const REQUESTS: i64 = 200;

/// The first request is held back in the middle of its work, until every other connection of the server has a duplicate
/// on it. Without that it would be done before the second one came, and a server that looks and then inserts would
/// pass.
pub(crate) async fn storm(client: &Client) -> anyhow::Result<Tally> {
    let ada = client.author("storm");
    let (requests, returned) = (REQUESTS, REQUESTS - 1);
    let expected = Counts { requests, created: 1, returned, messages: 1, stored: 1, records: 1, ..Counts::default() };
    let mut tally = Tally::begin("200 at once over both transports, one nonce", expected);

    // Before the gate is shut: whoever waits behind it has five seconds.
    let mut lines = Vec::new();
    for number in 0..REQUESTS {
        let transport = if number % 2 == 0 { Http } else { Socket };
        lines.push(client.open(transport, &ada).await?);
    }
    let gate = client.no_inserts().await?;
    let mut asking = JoinSet::new();
    for mut line in lines {
        asking.spawn(async move {
            let answer = line.ask(&enforced("hello", "4711")).await?;
            line.close().await?;
            anyhow::Ok(answer)
        });
    }
    client.all_waiting(CONNECTIONS.into()).await?;
    gate.rollback().await?;

    while let Some(answer) = asking.join_next().await {
        tally.count(&ada, &answer??);
    }
    Ok(tally.end(client).await?)
}
