//! Clients that never end their requests: they keep the console from nobody for long.

use std::time::Duration;

use pg_idempotency::testing::PATIENCE;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::console::Console;

/// None of them ends. The last one has a header, and its body does not come.
const HALF_REQUESTS: [&str; 3] = [
    "",
    "GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    "POST /find HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 9\r\n\r\n",
];

/// More of them than the console has places.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn half_requests_end(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let console = Console::start(&options, &[]);
    let address = console.url.trim_start_matches("http://");
    let mut slow = Vec::new();
    for n in 0..90 {
        let mut client = TcpStream::connect(address).await?;
        client.write_all(HALF_REQUESTS[n % 3].as_bytes()).await?;
        slow.push(client);
    }
    for client in &mut slow {
        let ended = timeout(PATIENCE, async {
            let mut bytes = Vec::new();
            // A reset is an end too.
            let _ = client.read_to_end(&mut bytes).await;
        });
        ended.await?;
    }
    let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).build()?;
    assert_eq!(client.get(&console.url).send().await?.status(), 200);
    Ok(())
}
