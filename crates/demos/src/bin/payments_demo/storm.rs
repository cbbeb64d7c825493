//! Very many requests at a time, all with one key and one body.

use std::io::{IsTerminal as _, Write as _, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::mpsc;

use crate::client::Client;
use crate::tally::{Counts, Tally};

const REQUESTS: usize = 2000;
const AT_A_TIME: usize = 200;

pub(crate) async fn storm(client: &Client, url: &str) -> anyhow::Result<Tally> {
    let expected =
        Counts { requests: REQUESTS, performed: 1, replayed: REQUESTS - 1, payments: 1, ..Counts::default() };
    let mut tally = Tally::begin("2000 requests, 200 at a time, one key", expected);
    let intent = client.intent("ada");

    // More than the answers that can wait: what a worker counts must not hold it up.
    let (answers, mut answered) = mpsc::channel(REQUESTS);
    let asked = Arc::new(AtomicUsize::new(0));
    for _ in 0..AT_A_TIME {
        let (client, url, intent) = (client.clone(), url.to_owned(), intent.clone());
        let (answers, asked) = (answers.clone(), asked.clone());
        tokio::spawn(async move {
            while asked.fetch_add(1, Ordering::Relaxed) < REQUESTS {
                if answers.send(client.ask(&url, &intent).await).await.is_err() {
                    break;
                }
            }
        });
    }
    drop(answers);

    while let Some(answer) = answered.recv().await {
        tally.count(&intent, answer);
        show_progress(&tally.counted)?;
    }
    tally.counted.payments = client.payments(&[intent]).await?;

    let Counts { requests, performed, replayed, errors, payments, .. } = tally.counted;
    let refused: usize = tally.counted.refused.values().sum();
    let errors = errors + refused;
    let noun = if payments == 1 { "payment" } else { "payments" };
    println!(
        "{requests} requests, {AT_A_TIME} at a time, one key: \
         {performed} performed, {replayed} replayed, {errors} errors, {payments} {noun}"
    );
    Ok(tally)
}

/// One line that changes on a terminal; a line now and then elsewhere.
fn show_progress(counted: &Counts) -> std::io::Result<()> {
    let Counts { requests, performed, replayed, .. } = counted;
    let line = format!("  {requests} of {REQUESTS} answered: {performed} performed, {replayed} replayed");
    let mut stdout = stdout();
    if stdout.is_terminal() {
        // The next line begins where this one did, and clears it.
        write!(stdout, "\r{line}\x1b[K{}", if *requests == REQUESTS { "\r\x1b[K" } else { "" })?;
        stdout.flush()
    } else if requests.is_multiple_of(500) {
        writeln!(stdout, "{line}")
    } else {
        Ok(())
    }
}
