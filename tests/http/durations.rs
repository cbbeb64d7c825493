//! Every duration that the library takes has a range, also one that a later release adds.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pg_idempotency::http::{IdempotencyLayer, InvalidSetting, RequestResumer};
use pg_idempotency::lease::{Leasing, Policy, Reconciler, Resumer};
use pg_idempotency::mark::{Marking, mark};
use pg_idempotency::operator::{health, resolve, unsettled, within};
use pg_idempotency::testing::age;
use pg_idempotency::{Error, Idempotency, InFlight, InvalidDuration, Janitor, Key};
use quote::ToTokens as _;
use sqlx::PgPool;

use crate::support::{transactional, user};

/// A service that means *never* types one of the last two.
const EXTREMES: [Duration; 4] =
    [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(100 * 366 * 24 * 3600), Duration::MAX];

/// What the function makes of a duration.
enum Takes {
    /// It refuses all four extremes.
    ARange,
    /// It takes zero and a nanosecond.
    AnyShort,
    /// It takes each, and the longest means never.
    Any,
}

/// The public functions with a duration among their arguments: the name, after that of the type.
fn functions_with_a_duration() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for path in sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let file = syn::parse_file(&fs::read_to_string(&path).expect("a text")).expect("Rust");
        for item in file.items {
            match item {
                syn::Item::Fn(function) if takes_a_duration(&function.vis, &function.sig) => {
                    found.insert(function.sig.ident.to_string());
                }
                syn::Item::Impl(syn::ItemImpl { trait_: None, self_ty, items, .. }) => {
                    let functions = items.into_iter().filter_map(|item| match item {
                        syn::ImplItem::Fn(function) if takes_a_duration(&function.vis, &function.sig) => Some(function),
                        _ => None,
                    });
                    let of_type = self_ty.to_token_stream().to_string();
                    found.extend(functions.map(|function| format!("{of_type}::{}", function.sig.ident)));
                }
                _ => {}
            }
        }
    }
    found
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let inside = paths.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    inside.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

fn takes_a_duration(visibility: &syn::Visibility, signature: &syn::Signature) -> bool {
    let arguments = signature.inputs.to_token_stream().to_string();
    let units = ["Duration", "InFlight", "Policy"];
    matches!(visibility, syn::Visibility::Public(_)) && arguments.split_whitespace().any(|word| units.contains(&word))
}

/// Calls the function with this duration. `None` means that this test does not know it.
async fn call(pool: &PgPool, function: &str, given: Duration) -> Option<Result<(), anyhow::Error>> {
    let hour = Duration::from_secs(3600);
    let key = Key::new("scope", "operation", "value").expect("a key");
    let wait = InFlight::Wait(given);
    let leasing = || Leasing::new(Policy::AtMostOnce { lease: hour }).expect("a lease").with_stored_request(true);
    let resumable = || {
        let leasing = Leasing::new(Policy::AtLeastOnce { lease: hour }).expect("a lease").with_stored_request(true);
        leasing.with_max_attempts(std::num::NonZeroU32::MIN)
    };
    let reconciler = || Reconciler::new(leasing(), "operation", hour).expect("a reconciler");
    let janitor = || Janitor::new(pool.clone());
    Some(match function {
        "Idempotency::with_retention" => Idempotency::new().with_retention(given).map(drop).map_err(Into::into),
        "Idempotency::with_in_flight" => Idempotency::new().with_in_flight(wait).map(drop).map_err(Into::into),
        "Janitor::with_pause" => janitor().with_pause(given).map(drop).map_err(Into::into),
        "Janitor::with_interval" => janitor().with_interval(given).map(drop).map_err(Into::into),
        "Janitor::with_grace" => match janitor().with_grace(given) {
            Ok(janitor) => janitor.sweep_once(1).await.map(drop).map_err(Into::into),
            Err(invalid) => Err(invalid.into()),
        },
        "IdempotencyLayer::with_run_timeout" => {
            transactional(pool).with_run_timeout(given).map(drop).map_err(Into::into)
        }
        "RequestResumer::with_interval" => {
            let layer = IdempotencyLayer::leased(pool.clone(), resumable(), user);
            let resumer = RequestResumer::new(&layer, "operation").expect("a resumer");
            resumer.with_interval(given).map(drop).map_err(Into::into)
        }
        "Leasing::new" => {
            let policies: [fn(Duration) -> Policy; 3] = [
                |lease| Policy::AtLeastOnce { lease },
                |lease| Policy::InSteps { lease },
                |lease| Policy::AtMostOnce { lease },
            ];
            policies.into_iter().try_for_each(|policy| Leasing::new(policy(given)).map(drop)).map_err(Into::into)
        }
        "Leasing::with_retention" => leasing().with_retention(given).map(drop).map_err(Into::into),
        "Leasing::with_in_flight" => leasing().with_in_flight(wait).map(drop).map_err(Into::into),
        "Leasing::with_resume_after" => leasing().with_resume_after(given).map(drop).map_err(Into::into),
        "Reconciler::new" => Reconciler::new(leasing(), "operation", given).map(drop).map_err(Into::into),
        "Reconciler::with_distance" => reconciler().with_distance(given).map(drop).map_err(Into::into),
        "Reconciler::with_give_up_after" => reconciler().with_give_up_after(given).map(drop).map_err(Into::into),
        "Reconciler::with_time_out" => reconciler().with_time_out(given).map(drop).map_err(Into::into),
        "Reconciler::with_interval" => reconciler().with_interval(given).map(drop).map_err(Into::into),
        "Resumer::with_interval" => {
            let resumer = Resumer::new(resumable(), "operation").expect("a resumer");
            resumer.with_interval(given).map(drop).map_err(Into::into)
        }
        "Marking::new" => Marking::new(given).map(drop).map_err(Into::into),
        "Marking::with_in_flight" => {
            Marking::new(2 * hour).expect("a retention").with_in_flight(wait).map(drop).map_err(Into::into)
        }
        "mark" => {
            let mut tx = pool.begin().await.expect("a transaction");
            mark(&mut tx, &key, given).await.map(drop).map_err(Into::into)
        }
        "health" => health(pool, given).await.map(drop).map_err(Into::into),
        // There is no record, so a retention in range is a change that comes too late.
        "resolve" => match resolve(pool, &key, 1, &"answer".to_owned(), given).await {
            Ok(()) | Err(Error::Changed) => Ok(()),
            Err(error) => Err(error.into()),
        },
        "unsettled" => unsettled(pool, 1, None, Some(given)).await.map(drop).map_err(Into::into),
        // Work that is ready at once needs no time.
        "within" => within(given, async { Ok(()) }).await.map_err(Into::into),
        "age" => {
            mark_one(pool, &key).await;
            match age(pool, &key, given).await {
                // The calendar of the server ends there.
                Err(Error::Database(error)) if given == Duration::MAX && error.as_database_error().is_some() => Ok(()),
                aged => aged.map_err(Into::into),
            }
        }
        _ => return None,
    })
}

async fn mark_one(pool: &PgPool, key: &Key) {
    let mut tx = pool.begin().await.expect("a transaction");
    let _ = mark(&mut tx, key, Duration::from_secs(3600)).await.expect("marked");
    tx.commit().await.expect("committed");
}

fn takes(function: &str) -> Takes {
    match function {
        "Janitor::with_pause" | "Janitor::with_grace" | "Leasing::with_resume_after" => Takes::AnyShort,
        "health" | "unsettled" | "within" | "age" => Takes::Any,
        _ => Takes::ARange,
    }
}

/// The range, as the error tells it.
fn refusal(error: &anyhow::Error) -> Option<InvalidDuration> {
    match (error.downcast_ref(), error.downcast_ref()) {
        (Some(Error::InvalidDuration(invalid)), _) | (_, Some(InvalidSetting::Duration(invalid))) => Some(*invalid),
        _ => error.downcast_ref().copied(),
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_duration_has_a_range_or_means_what_it_says(pool: PgPool) -> anyhow::Result<()> {
    let functions = functions_with_a_duration();
    assert!(functions.len() >= 24, "too few, so this test reads the list wrongly: {functions:?}");
    let mut range = None;
    for function in &functions {
        for (extreme, given) in EXTREMES.into_iter().enumerate() {
            let Some(called) = call(&pool, function, given).await else {
                panic!("{function} takes a duration; add it to this test");
            };
            let is_refused = match takes(function) {
                Takes::ARange => true,
                Takes::AnyShort => extreme >= 2,
                Takes::Any => false,
            };
            match called {
                Ok(()) => assert!(!is_refused, "{function} takes {given:?}"),
                Err(error) => {
                    let refusal = refusal(&error).unwrap_or_else(|| panic!("{function} of {given:?}: {error:#}"));
                    assert!(is_refused, "{function} refuses {given:?}");
                    range = Some(refusal);
                }
            }
        }
        // The range that the error tells is the range that counts.
        let Some(InvalidDuration { shortest, longest, .. }) = range.take() else { continue };
        for given in [shortest, longest] {
            let called = call(&pool, function, given).await.expect("it is known");
            assert!(called.is_ok(), "{function} of {given:?}: {called:?}");
        }
        for given in [shortest.checked_sub(Duration::from_nanos(1)), Some(longest + Duration::from_nanos(1))] {
            let Some(given) = given else { continue };
            let called = call(&pool, function, given).await.expect("it is known");
            assert!(called.is_err(), "{function} takes {given:?}");
        }
    }
    Ok(())
}
