//! The script: what clients do with nonces, one step after the other.

use crate::client::Client;
use crate::client::Transport::{Http, Socket};
use crate::storm::storm;
use crate::tally::{Counts, Tally};

/// Each as JSON, for no encoder would write all of these.
const INVALID_NONCES: [&str; 14] = [
    r#""""#,
    r#""abcdefghijklmnopqrstuvwxyz""#,
    r#""a\u0000b""#,
    r#""a\nb""#,
    "18446744073709551616",
    "-9223372036854775809",
    "1.0",
    "1e3",
    "-0",
    "true",
    "[]",
    r#"["a"]"#,
    "{}",
    "nonce",
];

pub(crate) async fn run(client: &Client, tallies: &mut Vec<Tally>) -> anyhow::Result<()> {
    tallies.push(ordinary(client).await?);
    tallies.push(repeats(client).await?);
    tallies.push(strings_and_integers(client).await?);
    tallies.push(other_content(client).await?);
    tallies.push(two_authors(client).await?);
    tallies.push(window(client).await?);
    tallies.push(invalid(client).await?);
    tallies.push(storm(client).await?);
    Ok(())
}

/// A message whose nonce is to be enforced. The nonce is JSON.
pub(crate) fn enforced(content: &str, nonce: &str) -> String {
    format!(r#"{{"content":"{content}","nonce":{nonce},"enforce_nonce":true}}"#)
}

async fn ordinary(client: &Client) -> anyhow::Result<Tally> {
    let ada = client.author("ordinary");
    let expected = Counts { requests: 12, created: 12, messages: 12, stored: 12, records: 1, ..Counts::default() };
    let mut tally = Tally::begin("nothing to enforce, each twice", expected);
    for message in [
        r#"{"content":"hello"}"#,
        r#"{"content":"hello","nonce":"n-1"}"#,
        r#"{"content":"hello","nonce":"n-1","enforce_nonce":false}"#,
        r#"{"content":"hello","enforce_nonce":true}"#,
        r#"{"content":"hello","nonce":null,"enforce_nonce":true}"#,
    ] {
        tally.ask(client, Http, &ada, message).await?;
        tally.ask(client, Socket, &ada, message).await?;
    }
    // A nonce that was not enforced is not remembered.
    tally.ask(client, Http, &ada, &enforced("hello", r#""n-1""#)).await?;
    tally.ask(client, Socket, &ada, r#"{"content":"hello","nonce":"n-1"}"#).await?;
    Ok(tally.end(client).await?)
}

async fn repeats(client: &Client) -> anyhow::Result<Tally> {
    let ada = client.author("repeats");
    let expected =
        Counts { requests: 8, created: 2, returned: 6, messages: 2, stored: 2, records: 2, ..Counts::default() };
    let mut tally = Tally::begin("repeats over either transport", expected);
    for transport in [Http, Socket, Http, Socket] {
        tally.ask(client, transport, &ada, &enforced("first over HTTP", r#""n-1""#)).await?;
    }
    for transport in [Socket, Http, Socket, Http] {
        tally.ask(client, transport, &ada, &enforced("first over the socket", r#""n-2""#)).await?;
    }
    Ok(tally.end(client).await?)
}

async fn strings_and_integers(client: &Client) -> anyhow::Result<Tally> {
    let ada = client.author("integers");
    let expected =
        Counts { requests: 10, created: 5, returned: 5, messages: 5, stored: 5, records: 5, ..Counts::default() };
    let mut tally = Tally::begin("1 and \"1\", and the longest nonces", expected);
    for (first, again) in [
        ("1", r#""1""#),
        (r#""18446744073709551615""#, "18446744073709551615"),
        ("-9223372036854775808", r#""-9223372036854775808""#),
        // Twice the same 25 characters, and not the integer 1.
        (r#""ééééééééééééééééééééééééé""#, r#""\u00e9éééééééééééééééééééééééé""#),
        (r#""01""#, r#""\u00301""#),
    ] {
        tally.ask(client, Http, &ada, &enforced("hello", first)).await?;
        tally.ask(client, Socket, &ada, &enforced("hello", again)).await?;
    }
    Ok(tally.end(client).await?)
}

async fn other_content(client: &Client) -> anyhow::Result<Tally> {
    let ada = client.author("other-content");
    let expected =
        Counts { requests: 3, created: 1, returned: 2, messages: 1, stored: 1, records: 1, ..Counts::default() };
    let mut tally = Tally::begin("one nonce, other content: the first message", expected);
    tally.ask(client, Http, &ada, &enforced("see you at 8", r#""n-1""#)).await?;
    tally.ask(client, Socket, &ada, &enforced("see you at 9", r#""n-1""#)).await?;
    tally.ask(client, Http, &ada, &enforced("see you at 10", r#""n-1""#)).await?;
    Ok(tally.end(client).await?)
}

async fn two_authors(client: &Client) -> anyhow::Result<Tally> {
    let authors = [client.author("ada"), client.author("bob")];
    let expected =
        Counts { requests: 4, created: 2, returned: 2, messages: 2, stored: 2, records: 2, ..Counts::default() };
    let mut tally = Tally::begin("one nonce, two authors", expected);
    for transport in [Http, Socket] {
        for author in &authors {
            tally.ask(client, transport, author, &enforced("hello", r#""n-1""#)).await?;
        }
    }
    Ok(tally.end(client).await?)
}

async fn window(client: &Client) -> anyhow::Result<Tally> {
    let ada = client.author("window");
    let expected =
        Counts { requests: 4, created: 2, returned: 2, messages: 2, stored: 2, records: 1, ..Counts::default() };
    let mut tally = Tally::begin("repeats after 0, 200, 301 and 501 s", expected);
    tally.ask(client, Http, &ada, &enforced("hello", r#""n-1""#)).await?;
    client.pass_time(&ada, 200.0).await?;
    tally.ask(client, Socket, &ada, &enforced("hello", r#""n-1""#)).await?;
    // Past the window the nonce is new, whether or not a sweep has come by, and starts a window of its own.
    client.pass_time(&ada, 101.0).await?;
    tally.ask(client, Http, &ada, &enforced("hello", r#""n-1""#)).await?;
    client.pass_time(&ada, 200.0).await?;
    tally.ask(client, Socket, &ada, &enforced("hello", r#""n-1""#)).await?;
    Ok(tally.end(client).await?)
}

async fn invalid(client: &Client) -> anyhow::Result<Tally> {
    let ada = client.author("invalid");
    let requests = 4 * INVALID_NONCES.len() as i64 + 4;
    let expected = Counts { requests, refused: requests, ..Counts::default() };
    let mut tally = Tally::begin("invalid nonces and misspelt fields", expected);
    for transport in [Http, Socket] {
        for nonce in INVALID_NONCES {
            let refused = tally.ask(client, transport, &ada, &enforced("hello", nonce)).await?;
            if let Http = transport {
                println!("  {nonce}: {}", refused.body["detail"]);
            }
            tally.ask(client, transport, &ada, &format!(r#"{{"content":"hello","nonce":{nonce}}}"#)).await?;
        }
        tally.ask(client, transport, &ada, r#"{"content":"hello","nonce":"n-1","enforce_nounce":true}"#).await?;
        tally.ask(client, transport, &ada, r#"["hello","n-1",true]"#).await?;
    }
    Ok(tally.end(client).await?)
}
