//! Every duration that the library takes has a range, also one that a later release adds.

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pg_idempotency::http::{IdempotencyLayer, RequestResumer};
use pg_idempotency::lease::{LeaseOptions, Policy, Reconciler, Resumer};
use pg_idempotency::mark::{MarkOptions, mark};
use pg_idempotency::operator::{bounded, health, search, show, unsettled};
use pg_idempotency::testing::age;
use pg_idempotency::{Error, Idempotency, Janitor, Key, Misuse, OnDuplicate, SettleError};
use quote::ToTokens as _;
use sqlx::PgPool;

use crate::support::{transactional, user};

/// A service that means *never* types one of the last two.
const EXTREMES: [Duration; 4] =
    [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(100 * 366 * 24 * 3600), Duration::MAX];

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
    let units = ["Duration", "OnDuplicate", "Policy"];
    matches!(visibility, syn::Visibility::Public(_)) && arguments.split_whitespace().any(|word| units.contains(&word))
}

/// A setter panics for a duration that it does not take.
fn set<T>(setter: impl FnOnce() -> T) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(|| drop(setter()))).map_err(|_| "it panicked".to_owned())
}

/// A function returns an error for an argument that it does not take.
fn refusal(error: Error) -> Result<(), String> {
    match error {
        Error::Misuse(Misuse::Options { problem, .. }) => Err(problem),
        error => panic!("{error:?}"),
    }
}

/// Calls the function with this duration. `None` means that this test does not know it.
async fn call(pool: &PgPool, function: &str, given: Duration) -> Option<Result<(), String>> {
    let hour = Duration::from_secs(3600);
    let key = Key::new("scope", "operation", "value").expect("a key");
    let wait = || OnDuplicate::Wait(given);
    let leasing = || LeaseOptions::new(Policy::AtMostOnce { lease: hour }).store_request(true);
    let resumable = || {
        let leasing = LeaseOptions::new(Policy::AtLeastOnce { lease: hour }).store_request(true);
        leasing.max_attempts(std::num::NonZeroU32::MIN)
    };
    let reconciler = || Reconciler::new(leasing(), "operation", hour).expect("a reconciler");
    let janitor = || Janitor::new(pool.clone());
    Some(match function {
        "Idempotency::retention" => set(|| Idempotency::new().retention(given)),
        "Idempotency::on_duplicate" => set(|| Idempotency::new().on_duplicate(wait())),
        "Janitor::pause" => set(|| janitor().pause(given)),
        "Janitor::interval" => set(|| janitor().interval(given)),
        "Janitor::grace" => match catch_unwind(AssertUnwindSafe(|| janitor().grace(given))) {
            Ok(janitor) => janitor.sweep_once(1).await.map(drop).or_else(refusal),
            Err(_) => Err("it panicked".to_owned()),
        },
        "IdempotencyLayer::run_timeout" => set(|| transactional(pool).run_timeout(given)),
        "RequestResumer::interval" => {
            let layer = IdempotencyLayer::leased(pool.clone(), resumable(), user);
            let resumer = RequestResumer::new(&layer, "operation").expect("a resumer");
            set(|| resumer.interval(given))
        }
        "LeaseOptions::new" => {
            let policies: [fn(Duration) -> Policy; 3] = [
                |lease| Policy::AtLeastOnce { lease },
                |lease| Policy::InSteps { lease },
                |lease| Policy::AtMostOnce { lease },
            ];
            let taken = policies.map(|policy| set(|| LeaseOptions::new(policy(given))));
            assert_eq!(taken[0], taken[1], "{given:?}");
            assert_eq!(taken[0], taken[2], "{given:?}");
            taken[0].clone()
        }
        "LeaseOptions::retention" => set(|| leasing().retention(given)),
        "LeaseOptions::on_duplicate" => set(|| leasing().on_duplicate(wait())),
        "LeaseOptions::resume_after" => set(|| leasing().resume_after(given)),
        "Reconciler::new" => Reconciler::new(leasing(), "operation", given).map(drop).or_else(refusal),
        "Reconciler::distance" => set(|| reconciler().distance(given)),
        "Resumer::interval" => {
            let resumer = Resumer::new(resumable(), "operation").expect("a resumer");
            set(|| resumer.interval(given))
        }
        "MarkOptions::new" => set(|| MarkOptions::new(given)),
        "MarkOptions::on_duplicate" => set(|| MarkOptions::new(2 * hour).on_duplicate(wait())),
        "mark" => {
            let mut tx = pool.begin().await.expect("a transaction");
            mark(&mut tx, &key, given).await.map(drop).or_else(refusal)
        }
        "health" => health(pool, given).await.map(drop).or_else(refusal),
        // It is completed, so a retention in range comes too late.
        "Shown::resolve" => {
            mark_one(pool, &key).await;
            let shown = show(pool, &key).await.expect("a database").expect("a record");
            match shown.resolve(pool, &"answer".to_owned(), given).await {
                Err(SettleError::Other(error)) => refusal(error),
                settled => {
                    assert!(matches!(settled, Err(SettleError::Changed)), "{settled:?}");
                    Ok(())
                }
            }
        }
        "unsettled" => unsettled(pool, 1, None, Some(given)).await.map(drop).or_else(refusal),
        "search" => match search(pool, Some("scope"), None, "", 1, given).await {
            // A millisecond may be too short.
            Err(Error::Database(error)) if error.as_database_error().is_some() => Ok(()),
            found => found.map(drop).or_else(refusal),
        },
        // Work that is ready at once needs no time.
        "bounded" => bounded(given, async { Ok(()) }).await.or_else(refusal),
        "age" => {
            mark_one(pool, &key).await;
            match age(pool, &key, given).await {
                // The calendar of the server ends there.
                Err(Error::Database(error)) if given == Duration::MAX && error.as_database_error().is_some() => Ok(()),
                aged => aged.or_else(refusal),
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

/// The shortest and the longest duration that the function takes. `None`: it takes each, and the longest means never.
fn range(function: &str) -> Option<(Duration, Duration)> {
    let (millisecond, second, day) = (Duration::from_millis(1), Duration::from_secs(1), Duration::from_secs(86_400));
    let years = day * 3660;
    Some(match function {
        "health" | "unsettled" | "search" | "bounded" | "age" => return None,
        "Janitor::pause" | "LeaseOptions::resume_after" => (Duration::ZERO, day),
        "Janitor::interval" => (second, day),
        "Janitor::grace" => (Duration::ZERO, years),
        "Resumer::interval" | "RequestResumer::interval" => (100 * millisecond, day),
        "LeaseOptions::new" => (10 * millisecond, day / 2),
        // Half of what a lease of an hour leaves of the retention.
        "Reconciler::new" => (millisecond, (day - day / 24) / 2),
        _ if function.ends_with("::on_duplicate") => (millisecond, day / 24),
        _ => (millisecond, years),
    })
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_duration_has_a_range_or_means_what_it_says(pool: PgPool) {
    let functions = functions_with_a_duration();
    assert!(functions.len() >= 20, "too few, so this test reads the list wrongly: {functions:?}");
    for function in &functions {
        let range = range(function);
        let nanosecond = Duration::from_nanos(1);
        let edges = range.map_or(Vec::new(), |(shortest, longest)| {
            vec![shortest.saturating_sub(nanosecond), shortest, longest, longest + nanosecond]
        });
        for given in EXTREMES.into_iter().chain(edges) {
            let Some(called) = call(&pool, function, given).await else {
                panic!("{function} takes a duration; add it to this test");
            };
            let is_in_range = range.is_none_or(|(shortest, longest)| (shortest..=longest).contains(&given));
            assert_eq!(called.is_ok(), is_in_range, "{function} of {given:?}: {called:?}");
        }
    }
}
