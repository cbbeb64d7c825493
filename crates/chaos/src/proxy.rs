//! A proxy between the callers and the server. It cuts connections at the worst moments: before COMMIT is sent, after
//! its answer, and in the middle of a message. Or it swallows everything.

use std::net::Ipv4Addr;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use idempotency_check::wire::{Address, Entrance, Flow, Message, Tap, relay};
use rig::proxy::through;
use sqlx::postgres::PgConnectOptions;
use tokio::time::sleep;

use crate::random::Random;
use crate::world::World;

/// One COMMIT in so many is cut, and one other message in so many.
const COMMITS: u64 = 8;
const MESSAGES: u64 = 200;

/// How long a black hole stays, in milliseconds.
const HOLE: Range<u64> = 50..400;
/// Longer than any hole.
pub(crate) const PAST_ALL_HOLES: Duration = Duration::from_millis(HOLE.end + 100);

pub(crate) struct Proxy {
    pub(crate) options: PgConnectOptions,
    _entrance: Entrance,
}

impl Proxy {
    /// Between the callers and their server.
    pub(crate) async fn before(world: &Arc<World>) -> anyhow::Result<Self> {
        let server = Address::of(&world.options);
        let random = Arc::new(Mutex::new(world.random("proxy")));
        let of_wires = world.clone();
        let entrance = Entrance::tcp((Ipv4Addr::LOCALHOST, 0).into(), move |client| {
            let answer = OnceLock::new();
            let wire = Wire { world: of_wires.clone(), random: random.clone(), answer };
            let server = server.clone();
            async move {
                if let Ok(server) = server.connect().await {
                    relay(client, server, &wire).await;
                }
            }
        })
        .await?;
        Ok(Self { options: through(&world.options, entrance.port()), _entrance: entrance })
    }
}

struct Wire {
    world: Arc<World>,
    random: Arc<Mutex<Random>>,
    /// What becomes of the answer to the message that was hit.
    answer: OnceLock<Answer>,
}

/// In each case the connection is closed afterwards.
enum Answer {
    Lost,
    Halved,
    Silence,
}

impl Wire {
    fn draw<T>(&self, draw: impl FnOnce(&mut Random) -> T) -> T {
        draw(&mut self.random.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn hit(&self, fault: &'static str, answer: Answer) -> Flow {
        self.world.fault(fault);
        // A connection is hit once.
        let _ = self.answer.set(answer);
        Flow::Pass
    }

    async fn hole(&self) -> Flow {
        sleep(self.draw(|random| random.millis(HOLE))).await;
        Flow::Close
    }
}

impl Tap for Wire {
    async fn up(&self, message: &mut Message) -> Flow {
        let begins = |sql: &str| sql.to_ascii_uppercase().starts_with("COMMIT");
        let is_commit = message.kind() == b'Q' && message.sql().is_some_and(|sql| begins(&sql));
        let chance = if is_commit { COMMITS } else { MESSAGES };
        let (hit, cut) = self.draw(|random| (random.one_in(chance), random.below(6)));
        if !hit {
            return Flow::Pass;
        }
        match if is_commit { cut } else { 1 } {
            0 => {
                self.world.fault("cut before COMMIT was sent");
                Flow::Close
            }
            1 => {
                self.world.fault("cut within a message");
                Flow::Part(message.bytes().len() / 2)
            }
            2 => {
                self.world.fault("black hole before COMMIT");
                self.hole().await
            }
            3 => self.hit("cut after COMMIT was answered", Answer::Lost),
            4 => self.hit("cut within the answer to COMMIT", Answer::Halved),
            _ => self.hit("black hole after COMMIT", Answer::Silence),
        }
    }

    async fn down(&self, _: &mut Message) -> Flow {
        match self.answer.get() {
            None => Flow::Pass,
            Some(Answer::Lost) => Flow::Close,
            Some(Answer::Halved) => Flow::Part(3),
            Some(Answer::Silence) => self.hole().await,
        }
    }
}
