//! The output of each command under `--json` is as `output.schema.json` describes, and the schema describes nothing
//! else.

use std::collections::BTreeSet;
use std::time::Duration;

use pg_idempotency::Key;
use pg_idempotency::lease::{Finding, InDoubt, LeaseOptions, Reconciler};
use rig::fixture::Fixture;
use rig::lease::owner;
use serde_json::{Value, json};
use sqlx::PgPool;

use crate::support::{
    AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS, committed_after_an_error, decide_on, in_doubt, in_doubt_at, janitor_on,
    lapsed, text,
};

fn schema() -> Value {
    serde_json::from_str(include_str!("../../output.schema.json")).expect("JSON")
}

/// The outputs so far.
struct Outputs<'a> {
    pool: &'a PgPool,
    schema: Value,
    /// The properties that had a value, and the values of each enumeration, as paths in the schema.
    printed: BTreeSet<String>,
}

impl Outputs<'_> {
    /// Runs a command, and checks each line of its output. Returns the last line.
    fn check(&mut self, arguments: &[&str]) -> Value {
        let output = janitor_on(self.pool, &[arguments, &["--json"]].concat());
        let mut one = self.schema.clone();
        one["$ref"] = json!(format!("#/$defs/{}", arguments[0]));
        let validator = jsonschema::options().should_validate_formats(true).build(&one).expect("a schema");
        let mut last = Value::Null;
        for line in text(&output.stdout).lines() {
            last = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
            let errors: Vec<_> =
                validator.iter_errors(&last).map(|it| format!("{}: {it}", it.instance_path())).collect();
            assert!(errors.is_empty(), "{arguments:?}: {errors:#?}");
            walk(&self.schema, &self.schema["$defs"][arguments[0]], Some(&last), arguments[0], &mut self.printed);
        }
        assert!(!last.is_null(), "{arguments:?}: {output:?}");
        last
    }
}

/// Notes the paths of a part of the schema: with an instance those that occur in this instance, and otherwise all.
fn walk(schema: &Value, part: &Value, instance: Option<&Value>, path: &str, paths: &mut BTreeSet<String>) {
    if instance.is_some_and(Value::is_null) {
        return;
    }
    if let Some(name) = part["$ref"].as_str().and_then(|reference| reference.strip_prefix("#/$defs/")) {
        let path = if matches!(name, "record" | "decision" | "protection" | "state") { name } else { path };
        walk(schema, &schema["$defs"][name], instance, path, paths);
    }
    let values = part["enum"].as_array().into_iter().flatten().filter(|value| !value.is_null());
    for value in values.filter(|value| instance.is_none_or(|it| it == *value)) {
        paths.insert(format!("{path} is {value}"));
    }
    for (name, property) in part["properties"].as_object().into_iter().flatten() {
        assert_eq!(part["additionalProperties"], false, "{path}");
        let value = instance.and_then(|it| it.get(name));
        if instance.is_some() && value.is_none_or(Value::is_null) {
            continue;
        }
        let path = format!("{path}.{name}");
        walk(schema, property, value, &path, paths);
        paths.insert(path);
    }
    let values = part["additionalProperties"].as_object().map(|_| &part["additionalProperties"]);
    for (inner, is_list) in [(&part["items"], true), (values.unwrap_or(&Value::Null), false)] {
        match instance {
            _ if inner.is_null() => {}
            None => walk(schema, inner, None, path, paths),
            Some(Value::Array(items)) if is_list => {
                items.iter().for_each(|item| walk(schema, inner, Some(item), path, paths));
            }
            Some(Value::Object(members)) if !is_list => {
                members.values().for_each(|member| walk(schema, inner, Some(member), path, paths));
            }
            Some(_) => {}
        }
    }
}

fn key(value: &str) -> Key {
    Key::new("user:1", "POST /texts", value).expect("a valid key")
}

/// A record in each state and each mode.
async fn records(pool: &PgPool) -> anyhow::Result<Vec<Key>> {
    let states = ["completed", "expired", "mark", "in_flight", "released", "lapsed", "in_steps", "at_most_once"];
    let [completed, expired, mark, in_flight, released, lapsed_once, in_steps, at_most_once] = states.map(key);
    Fixture::completed(&completed, "body", &1)?.write(pool).await?;
    Fixture::completed(&expired, "body", &1)?.expired().write(pool).await?;
    Fixture::marked(&mark).write(pool).await?;
    // The renewals stop, and the lease goes on.
    drop(owner(pool, LeaseOptions::new(AT_MOST_ONCE), &in_flight).await);
    owner(pool, LeaseOptions::new(AT_LEAST_ONCE), &released).await.release("the gateway said no").await?;
    lapsed(pool, &lapsed_once, AT_LEAST_ONCE).await?;
    let head = r#"["POST","/texts",[["content-type","text/plain"]]]"#;
    let stored = [&[1], &u16::try_from(head.len())?.to_be_bytes()[..], head.as_bytes()].concat();
    sqlx::query("update idempotency.record set request = $1 where value = 'lapsed'").bind(stored).execute(pool).await?;
    in_doubt(pool, &in_steps).await?;
    lapsed(pool, &at_most_once, AT_MOST_ONCE).await?;
    Ok(vec![completed, expired, mark, in_flight, released, lapsed_once, in_steps, at_most_once])
}

/// An operation that a reconciler has looked up.
async fn probed(pool: &PgPool, value: &str) -> anyhow::Result<Key> {
    let key = Key::new("user:1", format!("probed {value}"), value)?;
    Fixture::lapsed(&key, "body", IN_STEPS)?.with_step_in_doubt("text").with_stored_request("body").write(pool).await?;
    let leasing = LeaseOptions::new(IN_STEPS).store_request(true);
    let reconciler = Reconciler::new(leasing, key.operation(), Duration::from_millis(1))?.probes(5, 5);
    let look = async |_: &InDoubt| match value {
        "unknown" => Ok(Finding::Unknown),
        "no trace" => Ok(Finding::NoTrace),
        _ => anyhow::bail!("no route"),
    };
    // The first visit only notes the doubt. The second one asks.
    for _ in 0..2 {
        let _ = reconciler.visit_one(pool, look).await?;
        let due = "update idempotency.record set probes = jsonb_set(probes, '{of,0,next}', '1') where value = $1";
        sqlx::query(due).bind(value).execute(pool).await?;
    }
    Ok(key)
}

#[sqlx::test(migrations = false)]
async fn each_output_is_as_the_schema_says_and_the_schema_says_no_more(pool: PgPool) -> anyhow::Result<()> {
    let mut outputs = Outputs { pool: &pool, schema: schema(), printed: BTreeSet::new() };
    outputs.check(&["migrate"]);
    outputs.check(&["migrate", "--any-language"]);
    sqlx::raw_sql("create table orders (id int); create table payments (id int)").execute(&pool).await?;
    outputs.check(&["protect", "orders"]);
    outputs.check(&["protect", "payments", "orders", "--warn"]);
    outputs.check(&["protect", "orders"]);

    let show = |key: &Key| ["show".to_owned(), key.scope().to_owned(), key.operation().into(), key.value().into()];
    let mut shown = records(&pool).await?;
    for value in ["unknown", "no trace", "failed"] {
        shown.push(probed(&pool, value).await?);
    }
    // The answer of the other service could not be stored.
    let found = "update idempotency.record set probes = jsonb_set(probes, '{of,0,finding}', '\"took_effect\"')
                 where operation = 'probed unknown'";
    outputs.check(&["show", "user:1", "probed unknown", "unknown"]);
    sqlx::query(found).execute(&pool).await?;
    for key in &shown {
        outputs.check(&show(key).each_ref().map(String::as_str));
    }
    outputs.check(&["show", "user:1", "POST /texts", "in_steps", "--step", "another"]);
    outputs.check(&["unsettled"]);
    outputs.check(&["unsettled", "--max-attempts", "1", "--limit", "2"]);
    outputs.check(&["stats"]);
    outputs.check(&["health", "--max-lag", "1s"]);

    let both = key("both");
    in_doubt_at(&pool, &both, &["text", "email"]).await?;
    committed_after_an_error(&pool, &key("transaction")).await?;
    let settle = |outputs: &mut Outputs<'_>, [command, value]: [&str; 2], more: &[&str]| {
        let seen = outputs.check(&["show", "user:1", "POST /texts", value])["seen"].clone();
        let seen = ["--seen", seen.as_str().expect("text")];
        let decision = [command, "user:1", "POST /texts", value, "--reason", "ticket 4711"];
        outputs.check(&[&decision[..], &seen, more].concat())
    };
    let resolved = settle(&mut outputs, ["resolve", "both"], &["--response", "1", "--step", "text"]);
    assert_eq!((&resolved["steps_left_in_doubt"], &resolved["step"]["name"]), (&json!(["email"]), &json!("text")));
    settle(&mut outputs, ["release", "both"], &["--step", "email"]);
    let resolved = settle(&mut outputs, ["resolve", "at_most_once"], &["--response", "1"]);
    assert_eq!((&resolved["value"], &resolved["state_before"]), (&json!("at_most_once"), &json!("indeterminate")));
    settle(&mut outputs, ["release", "transaction"], &[]);
    settle(&mut outputs, ["grant", "released"], &[]);
    outputs.check(&["show", "user:1", "POST /texts", "released"]);
    for value in ["lapsed", "released", "completed", "mark", "expired"] {
        settle(&mut outputs, ["forget", value], &[]);
    }
    let leased = ["forget", "user:1", "POST /texts", "in_flight", "--reason", "ticket 4711", "--json"];
    assert!(decide_on(&pool, &leased).stdout.is_empty(), "an error is no output");

    sqlx::query("update idempotency.record set expires_at = now() - interval '2 h'").execute(&pool).await?;
    outputs.check(&["sweep", "--batch-size", "1", "--pause", "1h", "--max-duration", "100ms"]);
    outputs.check(&["unprotect", "orders"]);

    let mut described = BTreeSet::new();
    for (name, part) in outputs.schema["$defs"].as_object().expect("definitions") {
        if !matches!(&**name, "token" | "count" | "time" | "time_or_null") {
            walk(&outputs.schema, part, None, name, &mut described);
        }
    }
    let never: Vec<_> = described.difference(&outputs.printed).collect();
    assert!(never.is_empty(), "no command has printed: {never:#?}");
    Ok(())
}
