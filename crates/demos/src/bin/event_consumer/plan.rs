//! What is sent, and what is to go wrong with it. By counting, not by lot: a failure can be had again.

use serde::Serialize;

use crate::queue::Queue;

/// A message's body: here it says what the outside world will do about it.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub(crate) enum Body {
    Plain,
    /// Longer than a lease.
    Slow,
    FailsTwice,
    AlwaysFails,
}

/// With the 40 of them that come twice, 300 messages.
const REQUESTS: i64 = 260;

/// The steps are no multiples of each other, so every kind of message has some that come twice.
pub(crate) async fn send(queue: &Queue, run: &str) -> sqlx::Result<()> {
    let mut late = Vec::new();
    for number in 0..REQUESTS {
        let request_id = format!("{run}-{number:03}");
        let body = body(number);
        let kills = kills(number);
        queue.send(&request_id, body, kills).await?;
        match number % 13 {
            // Right behind the first: often the first is in flight still.
            0 => queue.send(&request_id, body, kills).await?,
            // Behind all others: most often the first is completed.
            1 => late.push((request_id, body, kills)),
            _ => {}
        }
    }
    for (request_id, body, kills) in late {
        queue.send(&request_id, body, kills).await?;
    }
    Ok(())
}

fn body(number: i64) -> Body {
    match number {
        _ if number % 16 == 5 => Body::Slow,
        _ if number % 24 == 10 => Body::FailsTwice,
        _ if number % 32 == 20 => Body::AlwaysFails,
        _ => Body::Plain,
    }
}

/// How often the worker is killed that is at the request. Of four that are slow, one is left in peace, two get through
/// in the second attempt, and one in the third, which is the last.
fn kills(number: i64) -> i64 {
    match (body(number), number / 16 % 4) {
        (Body::Slow, 0 | 1) => 1,
        (Body::Slow, 2) => 2,
        _ => 0,
    }
}
