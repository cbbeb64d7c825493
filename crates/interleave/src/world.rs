//! A server, the actors' sessions on it, and a monitor beside them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use idempotency_check::wire::{Address, Entrance};
use pg_idempotency::{Key, operator};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Executor as _, PgConnection, PgPool, Row as _};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::actors::{self, Seat};
use crate::edits::{Edits, Sql};
use crate::scenarios::{Scenario, With};
use crate::statement;
use crate::trace::Seen;
use crate::wire::{self, At, Board, Part};
use crate::words::{cause, letter};

/// The most actors of a scenario.
const SEATS: usize = 4;
/// A step takes milliseconds. A world that does not come to rest is broken.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pause between two looks for sessions that wait.
const MOMENT: Duration = Duration::from_millis(1);

const SCHEMA: &str = "
    create schema interleave;
    -- What the actors do: `what` is a step, or nothing; `who` is the actor.
    create table interleave.effect (what text not null, who text not null);
    create function interleave.effect_of(argument jsonb, out status int4, out headers jsonb, out body bytea)
    language plpgsql as $$
    begin
        insert into interleave.effect (what, who) values ('', argument->>'who'::text);
        body := convert_to((argument->'who'::text)::text, 'UTF8');
    end $$;
    -- Records of other keys, which no statement may touch.
    create table interleave.bystander (like idempotency.record);
    -- Stops between the snapshot of a statement and its lock, at a gate that the monitor has locked for this actor. Two
    -- gates take turns, so that the second stop of a statement finds its gate locked while the monitor opens the first.
    create function interleave.stop_and_try(int8) returns boolean language plpgsql as $$
    declare
        gate int := 3 - coalesce(nullif(current_setting('interleave.gate', true), ''), '1')::int;
        seat int := current_setting('application_name');
    begin
        perform set_config('interleave.gate', gate::text, false);
        perform pg_advisory_lock_shared(gate, seat);
        perform pg_advisory_unlock_shared(gate, seat);
        return pg_try_advisory_xact_lock($1);
    end
    $$;
";

/// A function of the crate that tries one lock after another. Within a scenario, it stops before each try, too. A batch
/// then calls a copy, which has the edit of the original.
const STOPS: &str = "
    select replace(
        replace(pg_get_functiondef(oid), 'FUNCTION idempotency.', 'FUNCTION interleave.'),
        'pg_try_advisory_xact_lock(', 'interleave.stop_and_try('
    )
    from pg_proc where oid = 'idempotency.lock_in_order'::regproc::oid";

/// Why a schedule comes to no end. An edit of the SQL can cause this, unlike any other error of a search.
#[derive(Debug)]
pub(crate) struct Stuck(pub(crate) String);

impl std::fmt::Display for Stuck {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Stuck {}

/// What the next step of an actor may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Choice {
    /// Its held message, or its statement that stopped at a gate, goes on.
    Go(usize),
    /// As `Go`, for the message that its caller has left behind.
    GoLeft(usize),
    /// Its future is dropped while the COMMIT of a claim is held. The COMMIT stays held, and the release begins.
    Leave(usize),
    /// Its wait is sent, and ends by its own limit.
    TimeOut(usize),
    /// Its future is dropped. What it has sent reaches the server.
    Drop(usize),
    /// The server's process is killed.
    Kill(usize),
}

/// Why a statement does not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rest {
    /// At its gate, within a statement.
    Inside,
    /// By the processes of these actors.
    Blocked(Vec<usize>),
}

/// What the monitor sees while everybody rests.
#[derive(Debug)]
pub(crate) struct Sight {
    /// The actors that hold the advisory lock of a key.
    pub(crate) holders: BTreeSet<usize>,
    locks: Vec<String>,
    records: Vec<(i64, String)>,
    pub(crate) effects: Vec<(String, String)>,
    /// A response that no call may ignore is stored.
    pub(crate) response_is_live: bool,
    pub(crate) lease_is_live: bool,
    /// The committed record of the key, in the words of the specification.
    pub(crate) seen: Option<Seen>,
    /// The record of another key has changed.
    pub(crate) bystander_is_hurt: bool,
}

pub(crate) struct World {
    pub(crate) board: Arc<Board>,
    pub(crate) monitor: PgConnection,
    /// For the operator's functions, which take a pool.
    pub(crate) operators: PgPool,
    gates: PgConnection,
    gate_pid: i32,
    /// Whether statements stop at gates.
    inside: bool,
    /// Whether a claim that never begins is released in the background.
    leased: bool,
    ways: Vec<PgConnectOptions>,
    _entrances: Vec<Entrance>,
    pools: Vec<PgPool>,
    directory: PathBuf,
    // Of the schedule that runs.
    tasks: Vec<JoinHandle<()>>,
    pub(crate) key: Key,
    rests: BTreeMap<u64, Rest>,
    /// How many transactions have ended.
    ended: usize,
    /// How many had ended when an actor began to pause.
    pauses: BTreeMap<usize, usize>,
    /// How many gates the present statement of a connection has passed.
    passed: BTreeMap<u64, usize>,
}

/// Databases on this server, one for each thread.
pub(crate) async fn create_databases(server: &PgConnectOptions, count: usize) -> anyhow::Result<Vec<PgConnectOptions>> {
    let mut conn = PgConnection::connect_with(server).await?;
    conn.execute("create database interleave").await?;
    let pool = PgPool::connect_with(server.clone().database("interleave")).await?;
    pg_idempotency::migrate_any_language(&pool).await?;
    // So that a statement that breaks a rule of the records shows it.
    pool.execute(rig::strict::SQL).await?;
    pool.execute(SCHEMA).await?;
    for (scope, operation, value) in
        [("other", "call", "key"), ("interleave", "other", "key"), ("interleave", "call", "other")]
    {
        actors::bystander(&Key::new(scope, operation, value)?)?.write(&pool).await?;
    }
    pool.execute("insert into interleave.bystander table idempotency.record").await?;
    pool.close().await;
    let mut databases = Vec::new();
    for database in 0..count {
        let name = format!("interleave_{database}");
        conn.execute(AssertSqlSafe(format!("create database {name} template interleave"))).await?;
        // A deadlock is a violation, and there is no reason to wait for it.
        conn.execute(AssertSqlSafe(format!("alter database {name} set deadlock_timeout = '20ms'"))).await?;
        databases.push(server.clone().database(&name).disable_statement_logging());
    }
    Ok(databases)
}

pub(crate) async fn execute(database: &PgConnectOptions, sql: &str) -> anyhow::Result<()> {
    let mut conn = PgConnection::connect_with(database).await?;
    let executed = conn.execute(AssertSqlSafe(sql.to_owned())).await;
    conn.close().await?;
    Ok(executed.map(drop)?)
}

/// Before the name of a function of the schema, as a statement.
const FUNCTION: &str = "function ";

pub(crate) fn is_function(statement: &str) -> bool {
    statement.starts_with(FUNCTION)
}

fn pool(way: &PgConnectOptions) -> PgPool {
    let options = PgPoolOptions::new().max_connections(2).test_before_acquire(false).acquire_timeout(PATIENCE);
    options.idle_timeout(None).max_lifetime(None).connect_lazy_with(way.clone())
}

/// Where the sockets of a world are: in the directory of the server's socket, which script/with-postgres removes with
/// the server, even after this process was killed.
fn directory(server: &PgConnectOptions) -> PathBuf {
    let beside = match Address::of(server) {
        Address::Unix(socket) => socket.parent().map(Path::to_owned),
        Address::Tcp(..) => None,
    };
    let name = format!("interleave.{}", uuid::Uuid::new_v4().simple());
    beside.unwrap_or_else(std::env::temp_dir).join(name)
}

impl World {
    pub(crate) async fn open(database: &PgConnectOptions, edits: Edits) -> anyhow::Result<Self> {
        let directory = directory(database);
        let board = Arc::new(Board::default());
        let inside = edits.inside;
        let edits = Arc::new(edits);
        let (mut ways, mut entrances) = (Vec::new(), Vec::new());
        for actor in 0..SEATS {
            let (entrance, way) = wire::listen(database, &directory, actor, &board, &edits)?;
            ways.push(way.disable_statement_logging());
            entrances.push(entrance);
        }
        let mut gates = PgConnection::connect_with(database).await?;
        if inside {
            let copy: String = sqlx::query_scalar(STOPS).fetch_one(&mut gates).await?;
            gates.execute(AssertSqlSafe(copy)).await?;
        }
        let operators = pool(database);
        let key = Key::new("interleave", "call", "key")?;
        // If the crate does not trust the schema, each operator would fail, and each edit would seem to be found.
        operator::show(&operators, &key).await.context("the schema")?;
        Ok(Self {
            board,
            monitor: PgConnection::connect_with(&database.clone().options([("plan_cache_mode", "force_generic_plan")]))
                .await?,
            operators,
            gate_pid: sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut gates).await?,
            gates,
            inside,
            leased: false,
            pools: ways.iter().map(pool).collect(),
            ways,
            _entrances: entrances,
            directory,
            tasks: Vec::new(),
            key,
            rests: BTreeMap::new(),
            ended: 0,
            pauses: BTreeMap::new(),
            passed: BTreeMap::new(),
        })
    }

    pub(crate) async fn close(self) -> anyhow::Result<()> {
        for task in self.tasks.into_iter().filter(|task| !task.is_finished()) {
            task.abort();
            let _ = task.await;
        }
        // The gates open, and the processes of calls that came to no end are killed.
        self.gates.close().await?;
        let pids: Vec<i32> = self.board.lock().lanes.values().map(|lane| lane.pid).collect();
        let mut monitor = self.monitor;
        let kill = sqlx::query("select pg_terminate_backend(pid) from unnest($1::int4[]) as pid").bind(pids);
        kill.execute(&mut monitor).await?;
        monitor.close().await?;
        self.operators.close().await;
        for pool in &self.pools {
            let _ = timeout(PATIENCE, pool.close()).await;
        }
        let _ = std::fs::remove_dir_all(&self.directory);
        Ok(())
    }

    /// Begins a schedule: a new key, and every actor before its first message.
    pub(crate) async fn begin(&mut self, scenario: &Scenario) -> anyhow::Result<()> {
        let sql = "delete from idempotency.record; delete from interleave.effect;
            insert into idempotency.record table interleave.bystander";
        self.monitor.execute(sql).await?;
        for before in scenario.before() {
            before.fixture(&self.key)?.write(&mut self.monitor).await?;
        }
        self.board.change(|board| {
            board.players.clear();
            board.events.clear();
            board.players.resize_with(scenario.actors.len(), Default::default);
        });
        (self.rests, self.pauses, self.passed, self.ended) = Default::default();
        self.leased = scenario.has(With::Works);
        if self.inside {
            let close = "select pg_advisory_unlock_all();
                select pg_advisory_lock(gate, seat) from generate_series(1, 2) as gate, generate_series(0, 3) as seat";
            self.gates.execute(close).await?;
        }
        self.tasks.clear();
        for (at, act) in scenario.actors.iter().enumerate() {
            let seat = Seat { at, pool: self.pools[at].clone(), key: self.key.clone(), board: self.board.clone() };
            let acting = act(seat);
            let board = self.board.clone();
            self.tasks.push(tokio::spawn(async move {
                let end = acting.await.unwrap_or_else(|error| cause(&error));
                board.change(|board| board.players[at].end.get_or_insert(end).clone());
            }));
        }
        Ok(())
    }

    /// Waits until every actor has ended, is held, or waits for another one.
    pub(crate) async fn come_to_rest(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let is_late = Instant::now() >= deadline;
            anyhow::ensure!(!is_late, Stuck(format!("the actors do not come to rest: {:?}", self.board.lock())));
            let board = self.board.clone();
            let changed = board.changed.notified();
            let version = board.lock().version;
            self.end_releases();
            let Some(Working { lanes, is_news }) = self.working() else {
                let _ = timeout(100 * MOMENT, changed).await;
                continue;
            };
            if self.pass_read_only_ends().await? {
                continue;
            }
            // Most answers come at once, and not after a wait.
            if is_news && timeout(MOMENT, changed).await.is_ok() {
                continue;
            }
            let rests = if lanes.is_empty() { BTreeMap::new() } else { self.blocked(&lanes).await? };
            if rests.len() == lanes.len() && board.lock().version == version {
                self.rests = rests;
                break;
            }
            let _ = timeout(MOMENT, board.changed.notified()).await;
        }
        let board = self.board.lock();
        for lane in board.lanes.values().filter(|lane| lane.at == At::Held && lane.statement == statement::PAUSE) {
            self.pauses.entry(lane.actor).or_insert(self.ended);
        }
        Ok(())
    }

    /// A COMMIT or ROLLBACK of a transaction that has neither written nor locked anything changes nothing for others.
    async fn pass_read_only_ends(&mut self) -> anyhow::Result<bool> {
        let held: Vec<(u64, i32)> = {
            let mut board = self.board.lock();
            let unexamined = board.lanes.iter_mut().filter(|(_, lane)| lane.at == At::Held && lane.unexamined);
            unexamined
                .map(|(&id, lane)| {
                    lane.unexamined = false;
                    (id, lane.pid)
                })
                .collect()
        };
        if held.is_empty() {
            return Ok(false);
        }
        let locking: Vec<i32> = sqlx::query_scalar(
            "select pid from pg_locks where pid = any($1) and locktype in ('advisory', 'transactionid')",
        )
        .bind(held.iter().map(|(_, pid)| *pid).collect::<Vec<_>>())
        .fetch_all(&mut self.monitor)
        .await?;
        let free: Vec<u64> = held.into_iter().filter(|(_, pid)| !locking.contains(pid)).map(|(lane, _)| lane).collect();
        free.iter().for_each(|&lane| self.board.pass(lane, false));
        Ok(!free.is_empty())
    }

    /// A release ends with its COMMIT, which answers no caller.
    fn end_releases(&self) {
        let mut board = self.board.lock();
        let board = &mut *board;
        for (at, player) in board.players.iter_mut().enumerate().filter(|(_, player)| player.releases) {
            let released = player.heard.contains(&Part::Text(statement::RELEASE_UNBEGUN.to_owned()));
            let mut lanes = board.lanes.values().filter(|lane| lane.actor == at);
            player.releases = !released || lanes.any(|lane| lane.at != At::Client || lane.transaction != b'I');
        }
    }

    /// Whether the COMMIT of this actor's claim is held, and a lease begins with it.
    fn begins_lease(&self, board: &wire::Inner, at: usize) -> bool {
        let heard = &board.players[at].heard;
        let is = |part: &Part, name: &str| matches!(part, Part::Text(text) if text == name);
        // A replay may have to commit, too, because of a lock. Its last statement reads the record.
        let reads = ["response", "look"];
        let is_read = |part: &&Part| reads.iter().any(|name| is(part, name));
        let decided = heard.iter().rfind(|part| is_read(part) || is(part, "claim") || is(part, "take over"));
        let mut lanes = board.lanes.values().filter(|lane| lane.actor == at && lane.at == At::Held);
        self.leased
            && lanes.any(|lane| lane.statement == "commit")
            && !heard.iter().any(|part| is(part, "commit"))
            && decided.is_some_and(|part| !is_read(&part))
    }

    /// The connections on which the server works, if no client computes.
    fn working(&self) -> Option<Working> {
        let board = self.board.lock();
        let mut working = Working { lanes: Vec::new(), is_news: false };
        for (at, player) in board.players.iter().enumerate() {
            let mut lanes = board.lanes.iter().filter(|(_, lane)| lane.actor == at);
            let released = player.heard.contains(&Part::Text(statement::RELEASE_UNBEGUN.to_owned()));
            let computes = if player.end.is_none() || player.releases && !released {
                lanes.clone().all(|(_, lane)| lane.at == At::Client || lane.is_left)
            } else {
                // Its connections return to the pool.
                lanes.any(|(_, lane)| lane.at == At::Client && lane.transaction != b'I')
            };
            if computes {
                return None;
            }
        }
        for (&id, lane) in board.lanes.iter().filter(|(_, lane)| lane.at == At::Server) {
            if lane.in_vain || lane.pid == 0 {
                return None;
            }
            working.is_news |= !self.rests.contains_key(&id) && lane.statement != statement::AWAIT;
            working.lanes.push((id, lane.pid));
        }
        Some(working)
    }

    async fn blocked(&mut self, lanes: &[(u64, i32)]) -> anyhow::Result<BTreeMap<u64, Rest>> {
        let pids: Vec<i32> = lanes.iter().map(|(_, pid)| *pid).collect();
        let rows = sqlx::query("select pid, pg_blocking_pids(pid) as by from unnest($1::int4[]) as pid")
            .bind(&pids)
            .fetch_all(&mut self.monitor)
            .await?;
        let board = self.board.lock();
        let mut rests = BTreeMap::new();
        for row in rows {
            let (pid, by): (i32, Vec<i32>) = (row.try_get("pid")?, row.try_get("by")?);
            let Some((lane, _)) = lanes.iter().find(|(_, of)| *of == pid) else { continue };
            let actors = board.lanes.values().filter(|other| by.contains(&other.pid)).map(|other| other.actor);
            let actors: Vec<usize> = actors.collect();
            if by.contains(&self.gate_pid) {
                rests.insert(*lane, Rest::Inside);
            } else if !actors.is_empty() {
                rests.insert(*lane, Rest::Blocked(actors));
            }
        }
        Ok(rests)
    }

    /// What may happen next. `faulty`: there was a drop or a kill.
    pub(crate) fn choices(&self, scenario: &Scenario, faulty: bool) -> Vec<Choice> {
        let board = self.board.lock();
        let playing =
            (0..board.players.len()).filter(|&at| board.players[at].end.is_none() || board.players[at].releases);
        let (mut choices, mut pausing) = (Vec::new(), Vec::new());
        for at in playing.clone() {
            if self.next_lane(&board, at, true).is_some() {
                choices.push(Choice::GoLeft(at));
            }
            let Some((_, lane)) = self.next_lane(&board, at, false) else { continue };
            // A look before another transaction has ended would see the same.
            let pauses = matches!(&*lane.statement, statement::PAUSE | statement::TRY_LOCK)
                && lane.at == At::Held
                && self.pauses.get(&at) == Some(&self.ended);
            if pauses { &mut pausing } else { &mut choices }.push(Choice::Go(at));
        }
        if choices.is_empty() {
            choices = pausing;
        }
        if !faulty {
            let leaves = |&at: &usize| scenario.has(With::Leaves(at)) && self.begins_lease(&board, at);
            choices.extend(playing.clone().filter(leaves).map(Choice::Leave));
            choices.extend(playing.clone().filter(|&at| scenario.has(With::Drops(at))).map(Choice::Drop));
            choices.extend(playing.filter(|&at| scenario.has(With::Kills(at))).map(Choice::Kill));
        }
        choices
    }

    /// The connection of this actor that can go on: that of its call, or the one that its call has left.
    fn next_lane<'b>(&self, board: &'b wire::Inner, actor: usize, is_left: bool) -> Option<(u64, &'b wire::Lane)> {
        let can_go =
            |id: &u64, lane: &wire::Lane| lane.at == At::Held || matches!(self.rests.get(id), Some(Rest::Inside));
        let mut lanes =
            board.lanes.iter().filter(|(id, lane)| lane.actor == actor && lane.is_left == is_left && can_go(id, lane));
        lanes.next().map(|(&id, lane)| (id, lane))
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.board.lock().players.iter().all(|player| player.end.is_some() && !player.releases)
    }

    /// The actors that wait in a statement: whose it is, its name, and for whom it waits.
    pub(crate) fn waits(&self) -> Vec<(usize, String, Vec<usize>)> {
        let board = self.board.lock();
        let mut waits = Vec::new();
        for (id, rest) in &self.rests {
            if let (Rest::Blocked(by), Some(lane)) = (rest, board.lanes.get(id)) {
                waits.push((lane.actor, lane.statement.clone(), by.clone()));
            }
        }
        waits
    }

    /// Does this choice. Returns its name in a trace.
    pub(crate) async fn apply(&mut self, choice: Choice) -> anyhow::Result<String> {
        let (Choice::Go(at)
        | Choice::GoLeft(at)
        | Choice::Leave(at)
        | Choice::TimeOut(at)
        | Choice::Drop(at)
        | Choice::Kill(at)) = choice;
        let letter = letter(at);
        self.pauses.remove(&at);
        match choice {
            Choice::Leave(_) => {
                self.board.change(|board| {
                    board.players[at].releases = true;
                    board.players[at].end = Some("is dropped".to_owned());
                    let held = board.lanes.values_mut().filter(|lane| lane.actor == at && lane.at == At::Held);
                    held.for_each(|lane| lane.is_left = true);
                });
                self.tasks[at].abort();
                let _ = (&mut self.tasks[at]).await;
                return Ok(format!("{letter} is dropped, and its COMMIT is on its way"));
            }
            Choice::Drop(_) => {
                self.ended += 1;
                self.board.change(|board| board.players[at].releases = self.begins_lease(board, at));
                self.tasks[at].abort();
                // The future has to be gone before its message is sent.
                let _ = (&mut self.tasks[at]).await;
                self.board.change(|board| board.players[at].end = Some("is dropped".to_owned()));
                self.board.free(at);
                return Ok(format!("{letter} is dropped"));
            }
            Choice::Kill(_) => {
                self.ended += 1;
                let pids: Vec<i32> = {
                    let mut board = self.board.lock();
                    board.players[at].releases = self.begins_lease(&board, at);
                    board.lanes.values().filter(|lane| lane.actor == at).map(|lane| lane.pid).collect()
                };
                let kill = sqlx::query("select pg_terminate_backend(pid) from unnest($1::int4[]) as pid").bind(&pids);
                kill.execute(&mut self.monitor).await?;
                let deadline = Instant::now() + PATIENCE;
                while self.board.lock().lanes.values().any(|lane| pids.contains(&lane.pid)) && Instant::now() < deadline
                {
                    let _ = timeout(Duration::from_millis(1), self.board.changed.notified()).await;
                }
                // Its idle connections are broken, too.
                self.pools[at] = pool(&self.ways[at]);
                return Ok(format!("{letter} is killed"));
            }
            Choice::Go(_) | Choice::GoLeft(_) | Choice::TimeOut(_) => {}
        }
        let (id, pid, name) = {
            let board = self.board.lock();
            let lane = self.next_lane(&board, at, choice == Choice::GoLeft(at));
            let (id, lane) = lane.ok_or_else(|| Stuck(format!("{letter} cannot go on")))?;
            (id, lane.pid, lane.statement.clone())
        };
        if self.rests.get(&id) == Some(&Rest::Inside) {
            // The process at the gate gets the lock first, and the monitor when it has passed.
            let pass = sqlx::query(
                "select pg_advisory_unlock(classid::int4, objid::int4), pg_advisory_lock(classid::int4, objid::int4)
                from pg_locks where pid = $1 and locktype = 'advisory' and not granted",
            )
            .bind(pid);
            pass.execute(&mut self.gates).await?;
            self.rests.remove(&id);
            *self.passed.entry(id).or_default() += 1;
            if name == statement::TRY_LOCK {
                self.pauses.insert(at, self.ended);
            }
            return Ok(format!("{letter} {name} goes on"));
        }
        self.passed.remove(&id);
        if choice == Choice::TimeOut(at) {
            anyhow::ensure!(name == statement::AWAIT, Stuck(format!("{letter} does not wait")));
            self.board.pass(id, true);
            return Ok(format!("{letter} {name}, in vain"));
        }
        self.ended += usize::from(statement::ends(&name));
        if name == statement::TRY_LOCK {
            self.pauses.insert(at, self.ended);
        }
        self.board.pass(id, false);
        Ok(format!("{letter} {name}"))
    }

    /// Lets everybody end, in any order.
    pub(crate) async fn run_free(&mut self) -> anyhow::Result<()> {
        if self.inside {
            self.gates.execute("select pg_advisory_unlock_all()").await?;
        }
        let actors = self.board.lock().players.len();
        (0..actors).for_each(|at| self.board.free(at));
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.end_releases();
            let idle = {
                let board = self.board.lock();
                board.players.iter().all(|player| player.end.is_some() && !player.releases)
                    && board.lanes.values().all(|lane| lane.at == At::Client && lane.transaction == b'I')
            };
            if idle {
                return Ok(());
            }
            let is_late = Instant::now() >= deadline;
            anyhow::ensure!(!is_late, Stuck(format!("the actors do not end: {:?}", self.board.lock())));
            let _ = timeout(Duration::from_millis(100), self.board.changed.notified()).await;
        }
    }

    /// The statements that the actors have sent, and the functions of the schema that these call.
    pub(crate) async fn sql(&mut self) -> anyhow::Result<Sql> {
        let mut sql = self.board.lock().sql.clone();
        let functions: Vec<(String, String)> = sqlx::query_as(
            "select proname::text, pg_get_functiondef(oid) from pg_proc
            where pronamespace = 'idempotency'::regnamespace::oid and prokind = 'f'",
        )
        .fetch_all(&mut self.monitor)
        .await?;
        // A function may call another one.
        let mut known = 0;
        while known < sql.len() {
            known = sql.len();
            for (name, definition) in &functions {
                let call = format!("idempotency.{name}(");
                let mut others = sql.iter().filter(|(statement, _)| statement.strip_prefix(FUNCTION) != Some(name));
                if others.any(|(_, texts)| texts.iter().any(|text| text.contains(&call))) {
                    sql.insert(format!("{FUNCTION}{name}"), BTreeSet::from([definition.clone()]));
                }
            }
        }
        Ok(sql)
    }

    pub(crate) async fn look(&mut self) -> anyhow::Result<Sight> {
        let actors: BTreeMap<i32, usize> =
            self.board.lock().lanes.values().map(|lane| (lane.pid, lane.actor)).collect();
        let pids: Vec<i32> = actors.keys().copied().collect();
        sqlx::query(
            "with
                held as materialized (
                    select pid, concat(locktype = 'advisory' and granted, ' ', locktype, ' ', mode, ' ', granted) as lock
                    from pg_locks
                    where pid = any($1) and (locktype = 'transactionid' or locktype = 'advisory' and objsubid = 1)
                ),
                record as materialized (table idempotency.record except table interleave.bystander)
            select
                array(select pid from held order by pid, lock) as pids,
                array(select lock from held order by pid, lock) as locks,
                array(select token from record order by scope, operation, value) as tokens,
                array(
                    select concat(
                        regexp_replace(
                            (
                                to_jsonb(record) - '{token,claimed_at,lease_until,completed_at,expires_at}'::text[]
                            )::text,
                            '\\d{4}-\\d\\d-\\d\\dT[^\"]*', 'time', 'g'
                        ),
                        completed_at is null, expires_at > statement_timestamp(), lease_until > statement_timestamp()
                    )
                    from record order by scope, operation, value
                ) as records,
                array(select what from interleave.effect order by what, who) as whats,
                array(select who from interleave.effect order by what, who) as whos,
                exists (
                    select from record where completed_at is not null and expires_at > statement_timestamp()
                ) as response_is_live,
                exists (table interleave.bystander except table idempotency.record) as bystander_is_hurt,
                exists (select from record where lease_until > statement_timestamp()) as lease_is_live,
                array(
                    select unnest(array[
                        mode, (completed_at is not null)::text, (expires_at <= statement_timestamp())::text,
                        case
                            when lease_until is null then 'none'
                            when lease_until = '-infinity' then 'released'
                            when lease_until > statement_timestamp() then 'live'
                            else 'lapsed'
                        end,
                        coalesce(encode(fingerprint, 'hex'), ''), coalesce(encode(response_body, 'escape'), ''),
                        (steps -> 'pay'::text -> 'result'::text is not null)::text,
                        case
                            when steps -> 'send'::text -> 'result'::text is not null then 'done'
                            when steps -> 'send'::text -> 'begun'::text is not null then 'begun'
                            else 'new'
                        end
                    ])
                    from record where value = $2
                ) as seen",
        )
        .bind(pids)
        .bind(self.key.value())
        .try_map(|row: PgRow| {
            let (pids, locks): (Vec<i32>, Vec<String>) = (row.try_get("pids")?, row.try_get("locks")?);
            let locks: Vec<(usize, String)> = pids.iter().map(|pid| actors[pid]).zip(locks).collect();
            let (tokens, records): (Vec<i64>, Vec<String>) = (row.try_get("tokens")?, row.try_get("records")?);
            let (whats, whos): (Vec<String>, Vec<String>) = (row.try_get("whats")?, row.try_get("whos")?);
            let mut named: Vec<String> = locks.iter().map(|(actor, lock)| format!("{actor} {lock}")).collect();
            named.sort();
            Ok(Sight {
                holders: locks.iter().filter(|(_, lock)| lock.starts_with('t')).map(|(actor, _)| *actor).collect(),
                locks: named,
                records: tokens.into_iter().zip(records).collect(),
                effects: whats.into_iter().zip(whos).collect(),
                response_is_live: row.try_get("response_is_live")?,
                bystander_is_hurt: row.try_get("bystander_is_hurt")?,
                lease_is_live: row.try_get("lease_is_live")?,
                seen: Seen::of(row.try_get("seen")?),
            })
        })
        .fetch_one(&mut self.monitor)
        .await
        .context("the monitor")
    }

    /// All that decides how this schedule can go on, as a text. Tokens and times are numbered as they occur.
    pub(crate) fn state(&self, sight: &Sight) -> String {
        let board = self.board.lock();
        let mut numbers = BTreeMap::new();
        let mut number = |eight: [u8; 8]| {
            let next = numbers.len();
            *numbers.entry(eight).or_insert(next)
        };
        let mut state = format!("{:?} {:?} ", sight.locks, sight.effects);
        for (at, player) in board.players.iter().enumerate() {
            state.push_str(&format!("\n{:?} {:?} {} ", player.end, player.answer, player.releases));
            // A call that has returned does not use what it has heard. Its release has the token of its claim.
            let is_over = (player.answer.is_some() || player.end.is_some()) && !player.releases;
            let heard = if is_over { &[][..] } else { &player.heard };
            for part in heard {
                match part {
                    Part::Text(text) => state.push_str(text),
                    Part::Eight(eight) => state.push_str(&number(*eight).to_string()),
                }
                state.push(' ');
            }
            let busy = |lane: &wire::Lane| {
                lane.actor == at && (lane.at != At::Client || lane.transaction != b'I') && !lane.statement.is_empty()
            };
            for (id, lane) in board.lanes.iter().filter(|(_, lane)| busy(lane)) {
                let began = self.pauses.get(&at).is_some_and(|&began| began == self.ended);
                let rest = self.rests.get(id);
                // A batch stops once for each of its keys, and may have had their locks before.
                let passed = rest.filter(|rest| **rest == Rest::Inside).and(self.passed.get(id));
                state.push_str(&format!("{:?} {} {began} {rest:?} {passed:?}", lane.at, lane.statement));
            }
        }
        for (token, record) in &sight.records {
            state.push_str(&format!("\n{} {record}", number(token.to_be_bytes())));
        }
        state
    }
}

/// The connections on which only the server works.
struct Working {
    lanes: Vec<(u64, i32)>,
    /// Whether one of them may answer soon: it has not waited, and its statement is not one that waits.
    is_news: bool,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sqlx::postgres::PgConnectOptions;

    use super::directory;

    #[test]
    fn the_sockets_of_a_world_are_removed_with_the_server() {
        let server = "postgres://postgres@localhost/postgres?host=/tmp/pgi.abcdef";
        let server: PgConnectOptions = server.parse().expect("the URL of script/with-postgres");
        assert_eq!(directory(&server).parent(), Some(Path::new("/tmp/pgi.abcdef")));
    }
}
