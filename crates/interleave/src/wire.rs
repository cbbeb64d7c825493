//! The wire between an actor and the server. It holds each message that matters until the explorer lets it go, and
//! writes down what the server answers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use idempotency_check::wire::{Address, Entrance, Message, Stream};
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, oneshot};

use crate::edits::{Edits, Sql};
use crate::statement;
use crate::trace::{Event, Heard};

/// Before the first message of a connection is answered.
const CONNECT: &str = "connect";

/// Where the present message of a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// There is none: the client computes, or has nothing to do.
    Client,
    /// Held by the wire.
    Held,
    /// The server works on it.
    Server,
}

/// A connection of an actor.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) actor: usize,
    pub(crate) pid: i32,
    pub(crate) at: At,
    /// The name of the present statement, or of the last one.
    pub(crate) statement: String,
    /// Whether a held COMMIT or ROLLBACK has not been examined yet.
    pub(crate) unexamined: bool,
    /// Whether the present statement is a wait that ends after a millisecond.
    pub(crate) in_vain: bool,
    /// As in ReadyForQuery: `I`, `T` or `E`.
    pub(crate) transaction: u8,
    /// Its caller is gone, and did not wait for the answer to the held message. Until its transaction has ended, later
    /// messages are not held.
    pub(crate) is_left: bool,
    /// What the server has answered to the present statement.
    said: Heard,
    go: Option<oneshot::Sender<bool>>,
}

/// A part of what an actor has sent and heard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Text(String),
    /// A token or a time: two of them are compared, and their values mean nothing.
    Eight([u8; 8]),
}

/// What is known of an actor beside its connections.
#[derive(Debug, Default)]
pub(crate) struct Player {
    pub(crate) heard: Vec<Part>,
    /// The answer of its call, before its transaction has ended.
    pub(crate) answer: Option<String>,
    /// How the actor has ended.
    pub(crate) end: Option<String>,
    /// No message is held any more.
    pub(crate) free: bool,
    /// The call is over, and a task of the crate still releases its claim.
    pub(crate) releases: bool,
}

/// The state of all wires of a world.
#[derive(Debug, Default)]
pub(crate) struct Board {
    inner: Mutex<Inner>,
    pub(crate) changed: Notify,
}

#[derive(Debug, Default)]
pub(crate) struct Inner {
    pub(crate) lanes: BTreeMap<u64, Lane>,
    pub(crate) players: Vec<Player>,
    /// Counts the changes of this board.
    pub(crate) version: u64,
    /// The statements that were prepared, by name, as they were before an edit.
    pub(crate) sql: Sql,
    /// The statements of this schedule that were answered, in the order of the answers.
    pub(crate) events: Vec<Event>,
    last: u64,
}

impl Board {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut Inner) -> R) -> R {
        let mut inner = self.lock();
        inner.version += 1;
        let result = change(&mut inner);
        drop(inner);
        self.changed.notify_one();
        result
    }

    /// Lets the held message of this connection go. If it is a wait in vain, its limit ends it.
    pub(crate) fn pass(&self, lane: u64, in_vain: bool) {
        self.change(|board| {
            let Some(lane) = board.lanes.get_mut(&lane) else { return };
            lane.in_vain = in_vain;
            lane.at = At::Server;
            if let Some(go) = lane.go.take() {
                let _ = go.send(in_vain);
            }
        });
    }

    /// From now on, no message of this actor is held.
    pub(crate) fn free(&self, actor: usize) {
        let held: Vec<u64> = self.change(|board| {
            board.players[actor].free = true;
            let held = board.lanes.iter().filter(|(_, lane)| lane.actor == actor && lane.at == At::Held);
            held.map(|(&id, _)| id).collect()
        });
        held.into_iter().for_each(|lane| self.pass(lane, false));
    }
}

/// Listens for the connections of one actor. Returns how to connect.
pub(crate) fn listen(
    server: &PgConnectOptions,
    directory: &Path,
    actor: usize,
    board: &Arc<Board>,
    edits: &Arc<Edits>,
) -> anyhow::Result<(Entrance, PgConnectOptions)> {
    let directory = directory.join(actor.to_string());
    std::fs::create_dir_all(&directory)?;
    let address = Address::of(server);
    let (board, edits) = (board.clone(), edits.clone());
    let entrance = Entrance::unix(&directory, move |client| {
        connect(client, address.clone(), actor, board.clone(), edits.clone())
    })?;
    let options = PgConnectOptions::new_without_pgpass()
        .socket(directory)
        .port(entrance.port())
        .username(server.get_username())
        .database(server.get_database().unwrap_or("postgres"))
        .application_name(&actor.to_string())
        .ssl_mode(PgSslMode::Disable);
    Ok((entrance, options))
}

async fn connect(client: Stream, server: Address, actor: usize, board: Arc<Board>, edits: Arc<Edits>) {
    let Ok(server) = server.connect().await else { return };
    let lane = board.change(|board| {
        board.last += 1;
        let lane = Lane {
            actor,
            pid: 0,
            at: At::Server,
            statement: CONNECT.to_owned(),
            unexamined: false,
            in_vain: false,
            transaction: b'I',
            is_left: false,
            said: Heard::default(),
            go: None,
        };
        board.lanes.insert(board.last, lane);
        board.last
    });
    let (from_client, to_client) = tokio::io::split(client);
    let (from_server, to_server) = tokio::io::split(server);
    let wire = Wire { lane, actor, board: board.clone(), edits, answered: Notify::new() };
    tokio::select! {
        _ = wire.up(from_client, to_server) => {}
        _ = wire.down(from_server, to_client) => {}
    }
    board.change(|board| board.lanes.remove(&lane));
}

struct Wire {
    lane: u64,
    actor: usize,
    board: Arc<Board>,
    edits: Arc<Edits>,
    answered: Notify,
}

/// The messages that the server answers with one ReadyForQuery.
#[derive(Default)]
struct Batch {
    bytes: Vec<u8>,
    /// The text of the statement that it executes.
    sql: Option<String>,
    /// The parameters, as places in `bytes`.
    parameters: Vec<std::ops::Range<usize>>,
}

impl Wire {
    async fn up(&self, mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> std::io::Result<()> {
        to.write_all(Message::read_first(&mut from).await?.bytes()).await?;
        self.answered.notified().await;
        let mut prepared = HashMap::new();
        loop {
            let mut batch = self.read(&mut from, &mut prepared).await?;
            let name = batch.sql.as_deref().map_or("", statement::name);
            let name = if statement::opens(name) { String::new() } else { name.to_owned() };
            let in_vain = !name.is_empty() && self.hold(&name).await;
            if let (statement::AWAIT, Some(limit)) = (&*name, batch.parameters.get(4)) {
                let milliseconds: i64 = if in_vain { 1 } else { 60_000 };
                batch.bytes[limit.clone()].copy_from_slice(&milliseconds.to_be_bytes());
            }
            self.sent(&name, &batch);
            to.write_all(&batch.bytes).await?;
            self.answered.notified().await;
        }
    }

    async fn read(
        &self,
        from: &mut (impl AsyncRead + Unpin),
        prepared: &mut HashMap<String, String>,
    ) -> std::io::Result<Batch> {
        let mut batch = Batch::default();
        loop {
            let mut message = Message::read(from).await?;
            let sql = message.sql().map(String::from);
            let name = message.statement().map(String::from).unwrap_or_default();
            match (message.kind(), sql) {
                (b'P', Some(sql)) => {
                    let statement = statement::name(&sql);
                    if !matches!(statement, "" | statement::MOVES_TIME) {
                        self.board.lock().sql.entry(statement.to_owned()).or_default().insert(sql.clone());
                    }
                    let types = &message.body()[name.len() + sql.len() + 2..];
                    message.set_body(&[name.as_bytes(), &[0], self.edits.apply(&sql).as_bytes(), &[0], types].concat());
                    prepared.insert(name, sql);
                }
                (b'B', _) => {
                    let portal = message.body().iter().position(|&byte| byte == 0).unwrap_or_default() + 1;
                    let first = portal + name.len() + 1;
                    batch.parameters = parameters(message.body(), first, batch.bytes.len() + 5);
                    batch.sql = prepared.get(&name).cloned();
                }
                (b'Q', Some(sql)) => {
                    let name = statement::name(&sql);
                    if statement::opens(name) || statement::only_ends(name) {
                        self.board.lock().sql.entry(name.to_owned()).or_default().insert(sql.clone());
                    }
                    // Its values are literals. Only which function it calls is worth knowing.
                    if let Some((call, _)) = sql.split_once('(').filter(|(call, _)| call.contains("idempotency.")) {
                        let name = format!("{name} by a function");
                        self.board.lock().sql.entry(name).or_default().insert(format!("{call}("));
                    }
                    message.set_body(&[self.edits.apply(&sql).as_bytes(), &[0]].concat());
                    batch.sql = Some(sql);
                }
                _ => {}
            }
            batch.bytes.extend(message.bytes());
            if matches!(message.kind(), b'S' | b'Q' | b'X') {
                return Ok(batch);
            }
        }
    }

    /// Returns whether it is a wait in vain.
    async fn hold(&self, name: &str) -> bool {
        let (go, goes) = oneshot::channel();
        let held = self.board.change(|board| {
            let free = board.players.get(self.actor).is_none_or(|player| player.free);
            let Some(lane) = board.lanes.get_mut(&self.lane).filter(|lane| !free && !lane.is_left) else {
                return false;
            };
            lane.at = At::Held;
            lane.statement = name.to_owned();
            lane.unexamined = statement::only_ends(name);
            lane.go = Some(go);
            true
        });
        held && goes.await.unwrap_or(false)
    }

    fn sent(&self, name: &str, batch: &Batch) {
        self.board.change(|board| {
            if let Some(player) = board.players.get_mut(self.actor).filter(|_| !name.is_empty()) {
                player.heard.push(Part::Text(name.to_owned()));
                let eights = batch.parameters.iter().filter_map(|place| batch.bytes[place.clone()].try_into().ok());
                player.heard.extend(eights.map(Part::Eight));
            }
            if let Some(lane) = board.lanes.get_mut(&self.lane) {
                lane.at = At::Server;
                lane.statement = name.to_owned();
                lane.said = Heard::of(batch.parameters.iter().map(|place| &batch.bytes[place.clone()]));
            }
        })
    }

    async fn down(&self, mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> std::io::Result<()> {
        loop {
            let message = Message::read(&mut from).await?;
            self.heard(&message);
            to.write_all(message.bytes()).await?;
            if message.ready().is_some() {
                self.answered.notify_one();
            }
        }
    }

    fn heard(&self, message: &Message) {
        let body = message.body();
        let mut inner = self.board.lock();
        let board = &mut *inner;
        let Some(lane) = board.lanes.get_mut(&self.lane) else { return };
        match message.kind() {
            b'D' => lane.said.row = values(body, 0, 0).into_iter().map(|place| body[place].to_vec()).collect(),
            b'C' => lane.said.tag = String::from_utf8_lossy(body).trim_end_matches('\0').to_owned(),
            b'Z' if !matches!(&*lane.statement, "" | CONNECT) => {
                let said = std::mem::take(&mut lane.said);
                board.events.push(Event::of(self.actor, &lane.statement, said));
            }
            _ => {}
        }
        let heard = board.players.get_mut(self.actor).filter(|_| !lane.statement.is_empty());
        match (message.kind(), heard) {
            (b'K', _) => lane.pid = i32::from_be_bytes(*body.first_chunk().unwrap_or(&[0; 4])),
            (b'D', Some(player)) => player.heard.extend(columns(body)),
            (b'C', Some(player)) => player.heard.push(Part::Text(String::from_utf8_lossy(body).into_owned())),
            (b'E', Some(player)) => player.heard.extend(message.rejection().map(|said| Part::Text(said.code))),
            (b'Z', _) => {
                lane.transaction = message.ready().unwrap_or(b'I');
                // Its transaction has ended, and the connection is in the pool again. The release may get it.
                lane.is_left &= lane.transaction != b'I';
                lane.at = At::Client;
                lane.in_vain = false;
                board.version += 1;
                self.board.changed.notify_one();
            }
            _ => {}
        }
    }
}

/// The values of a counted list, each with its length before it, from this place on, as places moved by `offset`.
fn values(bytes: &[u8], mut at: usize, offset: usize) -> Vec<std::ops::Range<usize>> {
    let short = |at: usize| usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]));
    let count = short(at);
    at += 2;
    let value = |_| {
        let length = i32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let start = at + 4;
        at = start + usize::try_from(length).unwrap_or(0);
        start + offset..at + offset
    };
    (0..count).map(value).collect()
}

/// The parameters of a Bind message, behind the list of their formats.
fn parameters(bind: &[u8], at: usize, offset: usize) -> Vec<std::ops::Range<usize>> {
    let formats = usize::from(u16::from_be_bytes([bind[at], bind[at + 1]]));
    values(bind, at + 2 + 2 * formats, offset)
}

/// The length of an interval. The only one is the age of a transaction, which is younger than its call in every
/// schedule.
const INTERVAL: usize = 16;

fn columns(row: &[u8]) -> Vec<Part> {
    let value = |place: std::ops::Range<usize>| match row[place.clone()].try_into() {
        Ok(eight) => vec![Part::Eight(eight)],
        Err(_) if place.len() == INTERVAL => vec![Part::Text("age".to_owned())],
        Err(_) => text(&String::from_utf8_lossy(&row[place])),
    };
    let mut parts: Vec<Part> = values(row, 0, 0).into_iter().flat_map(value).collect();
    parts.push(Part::Text(order(&parts)));
    parts
}

/// The order of the times in a row. A call compares these times, for example to learn whether the record has expired. A
/// state numbers its times as they occur, so that the numbers do not show their order.
fn order(row: &[Part]) -> String {
    /// The microseconds from 2000, which is zero, to 2020 and to 2100. A token is seldom between them.
    const TIMES: std::ops::Range<i64> = 631_152_000_000_000..3_155_760_000_000_000;
    let eights = row.iter().filter_map(|part| if let Part::Eight(eight) = part { Some(*eight) } else { None });
    let times: Vec<i64> = eights.map(i64::from_be_bytes).filter(|time| TIMES.contains(time)).collect();
    let sorted: BTreeSet<i64> = times.iter().copied().collect();
    times.iter().map(|time| sorted.range(..time).count().to_string()).collect()
}

/// The setting `idempotency.claim` has tokens and the time of its transaction, in digits.
fn text(text: &str) -> Vec<Part> {
    let part = |word: &str| match word.parse::<i64>() {
        Ok(number) if word.len() > 8 => Part::Eight(number.to_be_bytes()),
        _ => Part::Text(word.to_owned()),
    };
    timeless(text).split(' ').map(part).collect()
}

/// The text without the times in it, which are strings of JSON: `"2026-11-22T…"`.
fn timeless(text: &str) -> String {
    let is_time = |part: &&str| part.len() > 10 && part.as_bytes()[10] == b'T' && part.starts_with(char::is_numeric);
    text.split('"').filter(|part| !is_time(part)).collect::<Vec<_>>().join("\"")
}
