//! The table of answers, generated: every state a record can be in, for every way to ask, against a second reading of
//! the table that shares no code with the crate's.

use pg_idempotency::lease::{Acquired, LeaseOptions, Policy};
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::{Error, Fingerprint, Idempotency, Key};
use rig::cases::each;
use rig::database::until_blocked;
use rig::functions;
use sqlx::{PgConnection, PgPool};
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Duration;

use super::doors::Door;
use crate::support::{janitor, key, outside};

const MODES: [&str; 5] = ["transaction", "at_least_once", "at_most_once", "in_steps", "mark"];
const STEPS: [Option<&str>; 3] = [
    None,
    Some(r#"{"ride": {"result": "1", "attempt": 1}}"#),
    Some(r#"{"ride": {"result": "1", "attempt": 1}, "text": {"begun": "2026-01-01T00:00:00Z", "attempt": 1}}"#),
];
const LEASES: [Option<&str>; 4] = [None, Some("-infinity"), Some("-1 min"), Some("40 s")];

/// The stored attempt, and the one that an operator permits. Attempt 0: the first claim never began, or its key was
/// freed.
const ATTEMPTS: [(i32, Option<i32>); 3] = [(ATTEMPT, None), (ATTEMPT, Some(ATTEMPT + 1)), (0, None)];
/// The limit of a service in lease mode.
const MOST: NonZeroU32 = NonZeroU32::new(ATTEMPT.unsigned_abs()).expect("three");

#[derive(Clone, Copy, Debug)]
pub(super) struct State {
    pub(super) mode: &'static str,
    completed: bool,
    attempt: i32,
    granted: Option<i32>,
    /// What `lease_until` is, relative to now.
    lease: Option<&'static str>,
    /// What earlier attempts have stored. The text in the third value is in doubt.
    steps: Option<&'static str>,
    expired: bool,
    same_fingerprint: bool,
    claimed_by_this_transaction: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Expected {
    InFlight,
    OtherMode,
    TakenOver { attempt: i32 },
    AlreadyInTransaction,
    KeyReused,
    Replayed,
    Indeterminate,
    Exhausted,
}

/// The attempt of a record whose work has begun.
const ATTEMPT: i32 = 3;

/// DESIGN.md's table, line by line.
fn expected(state: State, asked: &str) -> Expected {
    let lease_is_live = state.lease == Some("40 s");
    let is_open_claim = state.claimed_by_this_transaction && !state.completed && state.lease.is_none();
    if is_open_claim && [state.mode, asked] == ["transaction"; 2] {
        return Expected::AlreadyInTransaction;
    }
    if state.expired && !lease_is_live {
        return Expected::TakenOver { attempt: 1 };
    }
    let goes_over = match (state.mode, asked) {
        // An attempt has begun, and no owner works on it.
        ("at_least_once", "in_steps") => state.completed || lease_is_live || state.attempt == 0,
        ("in_steps", "at_least_once") => state.completed,
        _ => state.mode == asked,
    };
    if !goes_over {
        return Expected::OtherMode;
    }
    let in_doubt = state.steps == STEPS[2];
    let released = !state.completed && state.lease == Some("-infinity");
    if released && state.attempt == 0 {
        return Expected::TakenOver { attempt: 1 };
    }
    // In transaction mode nothing limits the attempts.
    let further = match asked == "transaction" || state.granted == Some(ATTEMPT + 1) {
        true => Expected::TakenOver { attempt: ATTEMPT + 1 },
        false => Expected::Exhausted,
    };
    if released && state.same_fingerprint && !in_doubt {
        return further;
    }
    if released && !state.same_fingerprint && ["transaction", "at_most_once"].contains(&state.mode) {
        return Expected::TakenOver { attempt: 1 };
    }
    if !state.same_fingerprint {
        return Expected::KeyReused;
    }
    if state.completed {
        return Expected::Replayed;
    }
    if lease_is_live {
        return Expected::InFlight;
    }
    if ["at_least_once", "in_steps"].contains(&asked) && !in_doubt {
        return further;
    }
    Expected::Indeterminate
}

fn every_state() -> Vec<State> {
    let mut states = Vec::new();
    for mode in MODES {
        for (lease, steps) in LEASES.into_iter().flat_map(|lease| STEPS.map(|steps| (lease, steps))) {
            for (bits, (attempt, granted)) in (0..16).flat_map(|bits| ATTEMPTS.map(|attempts| (bits, attempts))) {
                states.push(State {
                    mode,
                    lease,
                    steps,
                    attempt,
                    granted,
                    completed: bits & 1 != 0,
                    expired: bits & 2 != 0,
                    same_fingerprint: bits & 4 != 0,
                    claimed_by_this_transaction: bits & 8 != 0,
                });
            }
        }
    }
    states
}

/// Writes the state as a record; `false` where the strict schema of the tests bars it. Every record has the time of
/// this transaction, because that must not make it this transaction's own.
async fn write(conn: &mut PgConnection, key: &Key, state: State) -> bool {
    let body = if state.same_fingerprint { "body" } else { "other" };
    let fingerprint = Fingerprint::of_json(body).expect("a string");
    let written = sqlx::query(
        "
        insert into idempotency.record (
            mode, scope, operation, value, fingerprint, token, attempt, claimed_at, lease_until, completed_at, expires_at,
            response_body, steps, granted_attempt, request, probes
        )
        values (
            $1, $2, $3, $4, case when $1 = 'mark' then null else $5 end, 1, $6, now(),
            case when $7 = '-infinity' then '-infinity' else now() + nullif($7, '-infinity')::interval end,
            case when $8 then now() end,
            case when $9 then now() - interval '1 ms' else now() + interval '1 h' end,
            case when $8 then '\"first\"'::bytea end, $10::text::jsonb, $11,
            -- Every way to take the record over has to clear these.
            case when not $8 and $6 > 0 and $1 in ('in_steps', 'at_most_once') then '{}'::bytea end,
            case when not $8 and $6 > 0 and $1 in ('in_steps', 'at_most_once') then '{}'::jsonb end
        )
        ",
    )
    .bind(state.mode)
    .bind(key.scope())
    .bind(key.operation())
    .bind(key.value())
    .bind(fingerprint.as_bytes())
    .bind(state.attempt)
    .bind(state.lease)
    .bind(state.completed)
    .bind(state.expired)
    .bind(state.steps)
    .bind(state.granted)
    .execute(&mut *conn)
    .await;
    match written {
        Ok(_) if state.claimed_by_this_transaction => {
            let noted = sqlx::query("select set_config('idempotency.claim', '7 1', true)").execute(conn).await;
            noted.map(|_| true).expect("a setting")
        }
        Ok(_) => true,
        Err(sqlx::Error::Database(error)) if error.is_check_violation() => false,
        Err(error) => panic!("{state:?}: {error}"),
    }
}

/// The states that the strict schema allows. It bars an unfinished mark, a completed lease, a transaction with a
/// deadline, and others.
async fn possible_states(pool: &PgPool) -> anyhow::Result<Vec<State>> {
    let mut possible = Vec::new();
    for state in every_state() {
        let mut tx = pool.begin().await?;
        if write(&mut tx, &key("a"), state).await {
            possible.push(state);
        }
        tx.rollback().await?;
    }
    assert_eq!(possible.len(), POSSIBLE);
    Ok(possible)
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn every_state_gets_the_answer_of_the_table(pool: PgPool) -> anyhow::Result<()> {
    let states = possible_states(&pool).await?;
    each(Door::all()?, async |door| {
        for &state in &states {
            let key = key("a");
            let mut tx = pool.begin().await?;
            assert!(write(&mut tx, &key, state).await);
            let answer = door.call(&mut tx, &key, state).await?;
            assert_eq!(answer, expected(state, "transaction"), "{door:?} {state:?}");
            tx.rollback().await?;
        }
        Ok(())
    })
    .await;
    Ok(())
}

/// An open transaction has the key, and leaves the state when it commits.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn every_state_gets_the_answer_of_the_table_after_a_wait(pool: PgPool) -> anyhow::Result<()> {
    let states = possible_states(&pool).await?;
    let doors: Vec<_> = Door::all()?.into_iter().filter(|door| door.waits()).collect();
    for (door, &state) in doors.iter().flat_map(|door| states.iter().map(move |state| (door, state))) {
        outside(&pool, "truncate idempotency.record").await;
        let key = key("a");
        let mut owner = pool.begin().await?;
        functions::ensure(&mut owner, &key, Fingerprint::of_bytes(b"").as_bytes(), None).await?;
        sqlx::raw_sql("delete from idempotency.record").execute(&mut *owner).await?;
        assert!(write(&mut owner, &key, state).await);
        let mut tx = pool.begin().await?;
        if state.claimed_by_this_transaction {
            sqlx::query("select set_config('idempotency.claim', '7 1', true)").execute(&mut *tx).await?;
        }
        let commit = async {
            until_blocked(&pool, 1).await?;
            anyhow::Ok(owner.commit().await?)
        };
        let (answer, committed) = tokio::join!(door.call(&mut tx, &key, state), commit);
        committed?;
        assert_eq!(answer?, expected(state, "transaction"), "{door:?} {state:?}");
        let usable: i32 = sqlx::query_scalar("select 1").fetch_one(&mut *tx).await?;
        assert_eq!(usable, 1);
        tx.rollback().await?;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_state_gets_the_answer_of_the_table_in_lease_mode(pool: PgPool) -> anyhow::Result<()> {
    let lease = Duration::from_secs(40);
    let policies = [
        ("at_least_once", Policy::AtLeastOnce { lease }),
        ("at_most_once", Policy::AtMostOnce { lease }),
        ("in_steps", Policy::InSteps { lease }),
    ];
    let mut states = possible_states(&pool).await?;
    // A claim is a transaction of its own here: no record can be of the same one.
    states.retain(|state| !state.claimed_by_this_transaction);
    for (asked, policy) in policies {
        let leasing = LeaseOptions::new(policy).max_attempts(MOST);
        for &state in &states {
            sqlx::query("delete from idempotency.record").execute(&pool).await?;
            assert!(write(&mut *pool.acquire().await?, &key("a"), state).await);
            let answer = match leasing.acquire::<String, _>(&pool, &key("a"), "body").await {
                Ok(Acquired::Owner(lease)) => {
                    let kept: bool = sqlx::query_scalar(
                        "select steps is not distinct from $1::text::jsonb and granted_attempt is not distinct from $2
                            and token <> 1
                         from idempotency.record",
                    )
                    .bind(state.steps.filter(|_| lease.attempt() > 1))
                    .bind(state.granted.filter(|_| lease.attempt() > 1))
                    .fetch_one(&pool)
                    .await?;
                    assert!(kept, "these are kept by a take-over, and gone in a new operation: {state:?}");
                    Expected::TakenOver { attempt: lease.attempt().try_into()? }
                }
                Ok(Acquired::Replayed(response)) => {
                    assert_eq!(response, "first");
                    Expected::Replayed
                }
                Err(Error::OtherMode { stored, asked: told, .. }) => {
                    assert_eq!((&*stored.to_string(), &*told.to_string()), (state.mode, asked));
                    Expected::OtherMode
                }
                Err(Error::KeyReused { .. }) => Expected::KeyReused,
                Err(Error::InFlight { retry_after, .. }) => {
                    assert!(retry_after > lease / 2 && retry_after <= lease, "{retry_after:?}");
                    Expected::InFlight
                }
                Err(Error::Exhausted { attempts: 3, token: 1, .. }) => Expected::Exhausted,
                Err(Error::Indeterminate { attempt, token, steps, .. }) => {
                    assert_eq!((attempt, token), (3, 1));
                    assert_eq!(steps, if state.steps == STEPS[2] { &["text"][..] } else { &[] });
                    Expected::Indeterminate
                }
                Err(error) => panic!("{state:?}: {error:?}"),
            };
            assert_eq!(answer, expected(state, asked), "{leasing:?} {state:?}");
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_state_gets_the_answer_of_the_table_in_mark_mode(pool: PgPool) -> anyhow::Result<()> {
    let mut states = possible_states(&pool).await?;
    // A mark has no fingerprint.
    states.retain(|state| state.same_fingerprint);
    let options = MarkOptions::new(Duration::from_secs(300));
    let key = key("a");
    for (state, in_a_batch) in states.into_iter().flat_map(|state| [(state, false), (state, true)]) {
        let mut tx = pool.begin().await?;
        assert!(write(&mut tx, &key, state).await);
        let answer = match in_a_batch {
            true => options.mark_many(&mut tx, std::slice::from_ref(&key)).await.map(|marked| marked[0]),
            false => options.mark(&mut tx, &key).await,
        };
        let answer = match answer {
            Ok(Marked::First) => Expected::TakenOver { attempt: 1 },
            Ok(Marked::Duplicate) => Expected::Replayed,
            Err(Error::OtherMode { stored, .. }) => {
                assert_eq!(stored.to_string(), state.mode);
                Expected::OtherMode
            }
            Err(error) => panic!("{state:?}: {error:?}"),
        };
        assert_eq!(answer, expected(state, "mark"), "{state:?}, in a batch: {in_a_batch}");
        tx.rollback().await?;
    }
    Ok(())
}

/// transaction: 8 completed, 8 unfinished, 8 released; each lease mode: 8 completed, 8 each of released, lapsed, live;
/// in steps also 24 unfinished with finished steps, and 24 with one in doubt; mark: 8 completed. (8 are the
/// combinations of expired, same fingerprint, same transaction.) An attempt is granted to what is unfinished in a lease
/// mode, and attempt 0 is released in a lease mode, without steps.
const POSSIBLE: usize = 24 + 3 * 32 + 2 * 24 + 8 + (3 * 24 + 2 * 24) + 3 * 8;

/// The specification has the same states and answers. It does not count attempts, so one more attempt is granted here.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_specification_has_these_states_and_answers(pool: PgPool) -> anyhow::Result<()> {
    let mut answers = BTreeSet::new();
    for state in possible_states(&pool).await? {
        let is_limited = state.lease.is_some() && state.mode != "transaction";
        let is_specified = state.attempt == ATTEMPT
            && state.granted.is_some() == is_limited
            && state.steps != STEPS[1]
            && !state.claimed_by_this_transaction;
        for asked in MODES.into_iter().filter(|_| is_specified) {
            let has_bodies = state.mode != "mark" && asked != "mark";
            if has_bodies || state.same_fingerprint {
                answers.insert(specified(state, asked));
            }
        }
    }
    let specification = include_str!("../../../model/answers.txt");
    assert_eq!(answers, specification.lines().map(str::to_owned).collect());
    Ok(())
}

/// A line of `model/answers.txt`.
fn specified(state: State, asked: &str) -> String {
    let lease = match state.lease {
        _ if state.completed => "done",
        None => "unfinished",
        Some("-infinity") => "released",
        Some("-1 min") => "lapsed",
        Some(_) => "live",
    };
    let doubt = if state.steps == STEPS[2] { ", in doubt" } else { "" };
    let expired = if state.expired { ", expired" } else { "" };
    let body = if state.same_fingerprint { "" } else { ", another body" };
    let answer = match expected(state, asked) {
        Expected::TakenOver { attempt: 1 } => "take over as new".to_owned(),
        Expected::TakenOver { .. } => "take over".to_owned(),
        Expected::Replayed => "replayed".to_owned(),
        answer => format!("{answer:?}"),
    };
    format!("{}, {lease}{doubt}{expired}; asked: {asked}{body}; answer: {answer}", state.mode)
}

/// An expired record is ignored in any mode, so no answer depends on whether a sweep has deleted it, or on the way to
/// ask.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_sweep_changes_no_answer(pool: PgPool) -> anyhow::Result<()> {
    for state in possible_states(&pool).await? {
        let mut answers = Vec::new();
        for (swept, replay_first) in [(false, false), (false, true), (true, false), (true, true)] {
            let way = Idempotency::new().replay_first(replay_first);
            sqlx::query("delete from idempotency.record").execute(&pool).await?;
            assert!(write(&mut *pool.acquire().await?, &key("a"), state).await);
            if swept {
                janitor(&pool).sweep_once(10).await?;
            }
            let result =
                way.run(&pool, &key("a"), "body", async |_| -> Result<String, Error> { Ok("second".to_owned()) }).await;
            answers.push(match result {
                Ok(outcome) => format!("{outcome:?}"),
                Err(error) => format!("{:?}", std::mem::discriminant(&error)),
            });
        }
        assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{state:?}: {answers:?}");
    }
    Ok(())
}
