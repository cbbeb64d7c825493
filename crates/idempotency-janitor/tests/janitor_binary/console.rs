//! `console`: what it answers over HTTP. `browser` tests it as a person does.

use std::net::TcpListener;
use std::process::{Command, Stdio};

use pg_idempotency::testing;
use pg_idempotency::{Key, operator};
use reqwest::header::HeaderName;
use rig::database::options;
use rig::fixture::Fixture;
use rig::role::with_role;
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;

use crate::support::{
    AT_LEAST_ONCE, AT_MOST_ONCE, Process, assert_fails, command_at, command_on, committed_after_an_error, granted_to,
    in_doubt, in_doubt_at, janitor_on, lapsed, text,
};

/// The console as a process of its own.
pub(crate) struct Console {
    process: Process,
    pub(crate) url: String,
}

impl Console {
    pub(crate) fn start(pool: &PgPool, arguments: &[&str]) -> Self {
        Self::at(&pool.connect_options(), arguments)
    }

    pub(crate) fn at(options: &PgConnectOptions, arguments: &[&str]) -> Self {
        let mut command = command_at(options);
        command.args(["console", "--listen", "127.0.0.1:0"]).args(arguments).stderr(Stdio::null());
        Self::of(&mut command)
    }

    fn of(command: &mut Command) -> Self {
        let process = Process::start(command);
        let said = &process.said;
        let url = said
            .trim()
            .strip_prefix("console on ")
            .unwrap_or_else(|| panic!("{said}"))
            .trim_end_matches('/')
            .to_owned();
        Self { process, url }
    }
}

/// A browser without a window.
pub(crate) struct Visitor {
    client: reqwest::Client,
    url: String,
}

pub(crate) type Page = (u16, String);

impl Visitor {
    pub(crate) fn of(url: &str) -> anyhow::Result<Self> {
        Self::with(url, &[])
    }

    /// With these headers in each request.
    fn with(url: &str, headers: &[(&'static str, &str)]) -> anyhow::Result<Self> {
        let header = |&(name, value): &(_, &str)| Ok((HeaderName::from_static(name), value.parse()?));
        let headers = headers.iter().map(header).collect::<anyhow::Result<_>>()?;
        let client = reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none());
        Ok(Self { client: client.default_headers(headers).build()?, url: url.to_owned() })
    }

    async fn get(&self, path: &str) -> anyhow::Result<Page> {
        let response = self.client.get(format!("{}{path}", self.url)).send().await?;
        Ok((response.status().as_u16(), response.text().await?))
    }

    async fn post(&self, path: &str, fields: &[(&str, &str)]) -> anyhow::Result<Page> {
        let form =
            fields.iter().map(|(name, value)| format!("{name}={}", encoded(value))).collect::<Vec<_>>().join("&");
        let request = self.client.post(format!("{}{path}", self.url));
        let response = request.header("content-type", "application/x-www-form-urlencoded").body(form).send().await?;
        let status = response.status().as_u16();
        let target = response.headers().get("location").map(|to| to.to_str().map(str::to_owned)).transpose()?;
        Ok((status, target.unwrap_or(response.text().await?)))
    }

    /// The link of a key, and its page.
    pub(crate) async fn look_up(&self, key: &Key) -> anyhow::Result<(String, Page)> {
        let parts = [("scope", key.scope()), ("operation", key.operation()), ("value", key.value())];
        let (status, link) = self.post("/find", &parts).await?;
        assert_eq!(status, 303, "{link}");
        let page = self.get(&link).await?;
        Ok((link, page))
    }

    /// Decides about a page of a key, and confirms it.
    async fn settle(&self, link: &str, page: &str, action: &str, response: &str) -> anyhow::Result<Page> {
        let seen = field(page, "seen");
        let order = [
            ("seen", &*seen),
            ("action", action),
            ("response", response),
            ("reason", "ticket 4711"),
            ("operator", "Ada"),
        ];
        let (status, asked) = self.post(&format!("{link}/confirm"), &order).await?;
        if status != 200 {
            return Ok((status, asked));
        }
        assert!(asked.contains("Are you sure?"), "{asked}");
        self.post(&format!("{link}/settle"), &order).await
    }
}

/// The value of a field of the page's forms.
fn field(page: &str, name: &str) -> String {
    let after = page.split(&format!("name=\"{name}\" value=\"")).nth(1).unwrap_or_else(|| panic!("{name}: {page}"));
    after.split('"').next().unwrap_or_default().to_owned()
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

fn key(value: &str) -> Key {
    Key::new("user:1", "POST /texts", value).expect("a valid key")
}

async fn state(pool: &PgPool, key: &Key) -> anyhow::Result<Option<String>> {
    Ok(operator::show(pool, key).await?.map(|shown| shown.state.to_string()))
}

/// Releases the key with this value in a console with a log.
pub(crate) async fn released_in_a_console(pool: &PgPool, value: &str, log: &std::path::Path) -> anyhow::Result<()> {
    let console = Console::start(pool, &["--log", log.to_str().expect("UTF-8")]);
    let visitor = Visitor::of(&console.url)?;
    let (link, (_, page)) = visitor.look_up(&Key::new("scope", "operation", value)?).await?;
    let (status, receipt) = visitor.settle(&link, &page, "no_effect", "").await?;
    assert_eq!(status, 200, "{receipt}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_answer_forbids_scripts_frames_and_other_names_of_the_host(pool: PgPool) -> anyhow::Result<()> {
    let console = Console::start(&pool, &[]);
    let client = reqwest::Client::builder().no_proxy().build()?;
    let port = console.url.rsplit(':').next().expect("a port");
    for (method, path, host, status) in [
        ("GET", "/", "127.0.0.1", 200),
        ("GET", "/", "localhost", 200),
        ("GET", "/", "[::1]", 200),
        ("GET", "/waiting", "127.0.0.1", 200),
        ("GET", "/waiting?refresh=30", "127.0.0.1", 200),
        ("GET", "/find", "127.0.0.1", 200),
        ("GET", "/log", "127.0.0.1", 200),
        ("GET", "/style.css", "127.0.0.1", 200),
        ("GET", "/", "evil.example", 403),
        ("GET", "/log", "evil.example", 403),
        ("GET", "/style.css", "127.0.0.1.evil.example", 403),
        ("GET", "/nowhere", "127.0.0.1", 404),
        ("GET", "/key/abc", "127.0.0.1", 404),
        ("GET", "/key/abc/settle", "127.0.0.1", 405),
        ("POST", "/find", "127.0.0.1", 415),
        ("POST", "/key/abc/confirm", "127.0.0.1", 415),
        ("POST", "/", "127.0.0.1", 405),
    ] {
        let request = client.request(method.parse()?, format!("{}{path}", console.url));
        let response = request.header("host", format!("{host}:{port}")).send().await?;
        assert_eq!(response.status(), status, "{method} {path} {host}");
        let policy = response.headers()["content-security-policy"].to_str()?;
        for rule in ["default-src 'none'", "style-src 'self'", "form-action 'self'", "frame-ancestors 'none'"] {
            assert!(policy.contains(rule) && !policy.contains("unsafe"), "{policy}");
        }
        assert_eq!(response.headers()["cache-control"], "no-store");
        let body = response.text().await?;
        if path != "/style.css" || status != 200 {
            assert!(body.starts_with("<!DOCTYPE html>") && body.contains("<h1>"), "a page: {body}");
            assert!(!body.contains("<script") && !body.contains("style=") && !body.contains("://"), "{body}");
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_console_settles_each_way_and_logs_the_operator(pool: PgPool) -> anyhow::Result<()> {
    let [resolved, released, forgotten, stepped, exhausted] =
        ["resolved", "released", "forgotten", "a-step-in-doubt", "exhausted"].map(key);
    let downstream = lapsed(&pool, &resolved, AT_MOST_ONCE).await?;
    lapsed(&pool, &released, AT_MOST_ONCE).await?;
    committed_after_an_error(&pool, &forgotten).await?;
    let of_step = in_doubt(&pool, &stepped).await?;
    for _ in 0..3 {
        lapsed(&pool, &exhausted, AT_LEAST_ONCE).await?;
    }
    let console = Console::start(&pool, &["--max-attempts", "3"]);
    let visitor = Visitor::of(&console.url)?;
    let (_, overview) = visitor.get("/").await?;
    let place = |part| overview.find(part).unwrap_or_else(|| panic!("{part}: {overview}"));
    assert!(place("5 keys wait; the oldest") < place("Health") && place("Health") < place("Table"), "{overview}");
    assert!(!overview.contains("class=\"good\""), "nothing says that all is well: {overview}");
    let (status, list) = visitor.get("/waiting").await?;
    assert_eq!(status, 200, "{list}");
    for part in ["5 keys, the oldest", &downstream, &of_step, "step in doubt", "exhausted", "… (15 bytes)"] {
        assert!(list.contains(part), "{part}: {list}");
    }
    assert!(!list.contains("a-step-in-doubt"), "values are shortened: {list}");

    for (key, action, response, then) in [
        (&resolved, "took_effect", "{\r\n \"id\": 10000000000000000000001}", Some("completed")),
        (&released, "no_effect", "", Some("released")),
        (&forgotten, "forget", "", None),
        (&stepped, "took_effect", "\"sms-17\"", Some("released")),
        (&exhausted, "took_effect", "7", Some("completed")),
    ] {
        let (link, (status, page)) = visitor.look_up(key).await?;
        assert_eq!(status, 200, "{page}");
        let (status, done) = visitor.settle(&link, &page, action, response).await?;
        assert_eq!(status, 200, "{done}");
        assert_eq!(state(&pool, key).await?.as_deref(), then, "{key:?}");
        let (status, again) = visitor.settle(&link, &page, action, response).await?;
        assert_eq!((status, again.contains("the record has changed since it was shown")), (409, true), "{again}");
    }
    let body: Vec<u8> = sqlx::query_scalar("select response_body from idempotency.record where value = 'resolved'")
        .fetch_one(&pool)
        .await?;
    assert_eq!(text(&body), "{\n \"id\": 10000000000000000000001}", "not a digit less");
    let shown = operator::show(&pool, &stepped).await?.expect("a record");
    assert!(shown.steps.iter().all(|step| !step.in_doubt), "{shown:?}");
    let (_, list) = visitor.get("/waiting").await?;
    assert!(list.contains("No key waits."), "{list}");

    let log = console.process.terminate();
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines.len(), 5 + 1, "{log}");
    for (line, did) in
        lines.iter().zip(["resolved", "released", "forgotten", "resolved: the step \"text\"", "resolved"])
    {
        assert!(line.contains(&format!(" Ada: {did}")) && line.ends_with("because ticket 4711"), "{line}");
    }
    Ok(())
}

/// The page has two answers for each step in doubt, and settles one of them at a time.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_of_several_steps_in_doubt_is_settled_for_itself(pool: PgPool) -> anyhow::Result<()> {
    let key = key("two steps in doubt");
    // A browser changes line breaks.
    in_doubt_at(&pool, &key, &["text\nto <Bob>", "email"]).await?;
    let console = Console::start(&pool, &[]);
    let visitor = Visitor::of(&console.url)?;
    let (_, list) = visitor.get("/waiting").await?;
    assert_eq!(list.matches("step in doubt: ").count(), 2, "{list}");

    let (link, (_, page)) = visitor.look_up(&key).await?;
    for label in [
        "The step email took effect, and its result is the JSON below",
        "The step email took no effect",
        "The step text\\nto &lt;Bob&gt; took effect, and its result is the JSON below",
        "The step text\\nto &lt;Bob&gt; took no effect",
    ] {
        assert!(page.contains(label), "{label}: {page}");
    }
    assert_eq!(page.matches("type=\"radio\"").count(), 5, "and to forget it: {page}");
    assert!(!page.contains("disabled"), "{page}");
    assert_eq!(visitor.settle(&link, &page, "no_effect 2", "").await?.0, 400, "there are two");
    let (status, done) = visitor.settle(&link, &page, "no_effect 0", "").await?;
    assert_eq!((status, done.contains("released: the step &quot;email&quot;")), (200, true), "{done}");
    assert!(done.contains("which still waits for"), "{done}");
    assert_eq!(state(&pool, &key).await?.as_deref(), Some("indeterminate"));
    for action in ["took_effect 1", "no_effect 1", "forget"] {
        assert_eq!(visitor.settle(&link, &page, action, "7").await?.0, 409, "{action}: the page is of before");
    }
    let (_, page) = visitor.get(&link).await?;
    assert_eq!(page.matches("type=\"radio\"").count(), 3, "{page}");
    // A suspended owner begins another step under the same token.
    let begin =
        "update idempotency.record set steps = steps || '{\"more\": {\"begun\": \"2026-01-01\", \"attempt\": 1}}'";
    sqlx::query(begin).execute(&pool).await?;
    assert_eq!(visitor.settle(&link, &page, "no_effect", "").await?.0, 409, "it would be about another step");
    let (_, page) = visitor.get(&link).await?;
    assert_eq!(visitor.settle(&link, &page, "no_effect 0", "").await?.0, 200);
    let (_, page) = visitor.get(&link).await?;
    let (status, done) = visitor.settle(&link, &page, "took_effect", "\"sms-17\"").await?;
    assert_eq!((status, done.contains("which is released")), (200, true), "{done}");
    assert_eq!(state(&pool, &key).await?.as_deref(), Some("released"));
    let shown = operator::show(&pool, &key).await?.expect("a record");
    let names: Vec<_> = shown.steps.iter().map(|step| (&*step.name, step.in_doubt)).collect();
    assert_eq!(names, [("ride", false), ("text\nto <Bob>", false)]);
    Ok(())
}

/// The reader of standard output is gone. The decision is made, the page shows it, and the log of the process has it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_decision_that_was_made_is_shown_and_logged(pool: PgPool) -> anyhow::Result<()> {
    let released = key("released");
    lapsed(&pool, &released, AT_MOST_ONCE).await?;
    let log = std::env::temp_dir().join(format!("console-{}", uuid::Uuid::new_v4()));
    let mut command = command_on(&pool);
    command.args(["console", "--listen", "127.0.0.1:0"]).stderr(std::fs::File::create(&log)?);
    let mut console = Console::of(&mut command);
    drop(console.process.output.take());
    let visitor = Visitor::of(&console.url)?;
    let (link, (_, page)) = visitor.look_up(&released).await?;
    let (status, done) = visitor.settle(&link, &page, "no_effect", "").await?;
    assert_eq!((status, done.contains("released: scope")), (200, true), "{done}");
    assert_eq!(state(&pool, &released).await?.as_deref(), Some("released"));
    let logged = std::fs::read_to_string(&log)?;
    std::fs::remove_file(&log)?;
    for part in ["released: scope", "ticket 4711", "Ada"] {
        assert!(logged.contains(part), "{part}: {logged}");
    }
    Ok(())
}

/// Another claim, a lease that is live or was renewed, no record: the console refuses each, and nothing changes. The
/// library tests what else changes the version of a record.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_changed_record_is_not_settled(pool: PgPool) -> anyhow::Result<()> {
    let console = Console::start(&pool, &[]);
    let (one, other) = (Visitor::of(&console.url)?, Visitor::of(&console.url)?);

    let contested = key("two operators");
    lapsed(&pool, &contested, AT_MOST_ONCE).await?;
    let (link, (_, page)) = one.look_up(&contested).await?;
    let (_, (_, seen)) = other.look_up(&contested).await?;
    assert_eq!(other.settle(&link, &seen, "no_effect", "").await?.0, 200);
    for action in ["took_effect", "no_effect", "forget"] {
        let (status, refused) = one.settle(&link, &page, action, "1").await?;
        assert_eq!((status, refused.contains("look again")), (409, true), "{refused}");
        assert!(refused.contains(&link), "a way to look again: {refused}");
    }
    assert_eq!(state(&pool, &contested).await?.as_deref(), Some("released"));

    let live = key("live");
    lapsed(&pool, &live, AT_MOST_ONCE).await?;
    let (link, (_, page)) = one.look_up(&live).await?;
    sqlx::query("update idempotency.record set lease_until = now() + interval '1 h' where value = 'live'")
        .execute(&pool)
        .await?;
    let (status, refused) = one.settle(&link, &page, "forget", "").await?;
    assert_eq!((status, refused.contains("look again")), (409, true), "{refused}");
    let (_, page) = one.get(&link).await?;
    assert!(!page.contains("type=\"radio\"") && page.contains("wait for it"), "{page}");

    let revived = key("revived");
    lapsed(&pool, &revived, AT_MOST_ONCE).await?;
    let (link, (_, page)) = one.look_up(&revived).await?;
    sqlx::query("update idempotency.record set lease_until = statement_timestamp() where value = 'revived'")
        .execute(&pool)
        .await?;
    assert_eq!(one.settle(&link, &page, "no_effect", "").await?.0, 409, "its request may have gone out since");

    let gone = key("gone");
    let (_, (status, page)) = one.look_up(&gone).await?;
    assert_eq!((status, page.contains("there is no record of this key")), (404, true), "{page}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn bad_input_and_forged_forms_change_nothing(pool: PgPool) -> anyhow::Result<()> {
    let waiting = key("waiting");
    lapsed(&pool, &waiting, AT_MOST_ONCE).await?;
    let console = Console::start(&pool, &[]);
    let visitor = Visitor::of(&console.url)?;
    let (link, (_, page)) = visitor.look_up(&waiting).await?;
    let (status, refused) = visitor.settle(&link, &page, "took_effect", "{\"id\":").await?;
    assert_eq!((status, refused.contains("not valid JSON, see line 1, column 6")), (400, true), "{refused}");
    let (seen, unnamed) = (field(&page, "seen"), "the field &quot;Your name&quot; is empty");
    for (fields, code, says) in [
        (&[("seen", &*seen), ("action", "forget"), ("reason", "r"), ("operator", " ")][..], 400, unnamed),
        (&[("seen", &seen), ("action", "forget"), ("reason", " "), ("operator", "o")], 400, "Reason"),
        (&[("seen", &seen), ("action", "drop"), ("reason", "r")], 400, "cannot answer this request"),
        (&[("seen", &seen), ("reason", "r")], 422, "cannot answer this request"),
    ] {
        for step in ["confirm", "settle"] {
            let (status, refused) = visitor.post(&format!("{link}/{step}"), fields).await?;
            assert_eq!((status, refused.contains(says)), (code, true), "{says}: {refused}");
        }
    }
    let parts = [("scope", "s"), ("operation", "o"), ("value", "a\0b")];
    let (status, refused) = visitor.post("/find", &parts).await?;
    assert_eq!((status, refused.contains("control character U+0000")), (400, true), "{refused}");

    // Each character takes three bytes.
    let (status, refused) = visitor.post("/find", &[("scope", &"x".repeat((2 << 20) / 3))]).await?;
    assert_eq!((status, refused.contains("larger than 2 MiB")), (413, true), "{refused}");

    // What browsers send with a form of another site, of another port, and of a page that hides its address.
    let all = [("seen", &*seen), ("action", "forget"), ("reason", "r"), ("operator", "o")];
    let all = [&all[..], &[("scope", "s"), ("operation", "o"), ("value", "v")]].concat();
    for foreign in [
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-site"),
        ("origin", "http://evil.example"),
        ("origin", "http://127.0.0.1"),
        ("origin", "null"),
    ] {
        let visitor = Visitor::with(&console.url, &[foreign])?;
        for path in ["/find", &format!("{link}/confirm"), &format!("{link}/settle")] {
            let (status, refused) = visitor.post(path, &all).await?;
            assert_eq!(
                (status, refused.contains("a page of another site")),
                (403, true),
                "{foreign:?} {path}: {refused}"
            );
        }
        assert_eq!(visitor.get(&link).await?.0, 200, "a link from another site only shows");
    }
    for own in [("sec-fetch-site", "same-origin"), ("origin", &*console.url)] {
        let (status, asked) = Visitor::with(&console.url, &[own])?.post(&format!("{link}/confirm"), &all).await?;
        assert_eq!((status, asked.contains("Are you sure?")), (200, true), "{own:?}: {asked}");
    }
    assert_eq!(state(&pool, &waiting).await?.as_deref(), Some("indeterminate"));
    assert_eq!(console.process.terminate(), "stopped\n");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_open_address_is_refused_and_a_token_or_a_proxy_signs_in(pool: PgPool) -> anyhow::Result<()> {
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
        assert_fails(&janitor_on(&pool, &["console", "--listen", address]), 2, "--token-file");
    }
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    assert_fails(&janitor_on(&pool, &["console", "--listen", &address]), 1, "does another process use it?");

    let directory = std::env::temp_dir().join(format!("pgi-console-{}", uuid::Uuid::new_v4()));
    std::fs::create_dir(&directory)?;
    let file = directory.join("token");
    let path = file.to_str().expect("UTF-8");
    assert_fails(&janitor_on(&pool, &["console", "--token-file", path]), 2, "cannot use the token file");
    let nowhere = directory.join("nowhere/log");
    let nowhere = nowhere.to_str().expect("UTF-8");
    assert_fails(&janitor_on(&pool, &["console", "--log", nowhere]), 2, "cannot append to the log file");
    std::fs::write(&file, "short\n")?;
    assert_fails(&janitor_on(&pool, &["console", "--token-file", path]), 2, "at least 16 characters");
    std::fs::write(&file, "correct horse battery\n")?;
    let mut command = command_on(&pool);
    command.args(["console", "--listen", "0.0.0.0:0", "--token-file", path]);
    let console = Console::of(command.stderr(Stdio::null()));
    std::fs::remove_dir_all(&directory)?;
    let url = console.url.replace("0.0.0.0", "127.0.0.1");
    let client = reqwest::Client::builder().no_proxy().build()?;
    for (user, password, status) in [
        (None, "", 401),
        (Some("Ada"), "correct horse batterz", 401),
        (Some("Ada"), "", 401),
        (Some(""), "correct horse battery", 401),
        (Some("Ada"), "correct horse battery", 200),
    ] {
        let request = client.get(&url);
        let request = if let Some(user) = user { request.basic_auth(user, Some(password)) } else { request };
        let response = request.send().await?;
        assert_eq!(response.status(), status, "{user:?} {password}");
        assert_eq!(response.headers().contains_key("www-authenticate"), status == 401);
    }

    let waiting = key("waiting");
    lapsed(&pool, &waiting, AT_MOST_ONCE).await?;
    let console = Console::start(&pool, &["--user-header", "X-User"]);
    let response = client.get(&console.url).send().await?;
    assert_eq!((response.status().as_u16(), response.text().await?.contains("x-user")), (403, true));
    let twice = client.get(&console.url).header("X-User", "a client's own").header("X-User", "grace").send().await?;
    assert_eq!((twice.status().as_u16(), twice.text().await?.contains("has 2 such headers")), (403, true));
    let visitor = Visitor::with(&console.url, &[("x-user", "grace@example")])?;
    let (link, (_, page)) = visitor.look_up(&waiting).await?;
    assert!(!page.contains("Your name"), "the proxy has said it: {page}");
    assert_eq!(visitor.settle(&link, &page, "no_effect", "").await?.0, 200);
    let log = console.process.terminate();
    assert!(log.contains(" grace@example: released") && !log.contains("Ada"), "not what the form said: {log}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_read_only_console_needs_the_janitors_grants_and_settles_nothing(pool: PgPool) -> anyhow::Result<()> {
    let waiting = key("waiting");
    lapsed(&pool, &waiting, AT_MOST_ONCE).await?;
    with_role(&pool, &granted_to("shop_janitor"), async |role| {
        let console = Console::at(&options(&pool).username(role), &["--read-only"]);
        let visitor = Visitor::of(&console.url)?;
        let (status, list) = visitor.get("/waiting").await?;
        assert!(status == 200 && list.contains("1 keys, the oldest"), "{list}");
        let (link, (status, page)) = visitor.look_up(&waiting).await?;
        assert!(status == 200 && !page.contains("What happened?"), "{page}");
        let order = [("seen", "0"), ("action", "forget"), ("reason", "r"), ("operator", "o")];
        let (status, refused) = visitor.post(&format!("{link}/settle"), &order).await?;
        assert!(status == 403 && refused.contains("read-only"), "{refused}");
        assert_eq!(state(&pool, &waiting).await?.as_deref(), Some("indeterminate"));
        anyhow::Ok(())
    })
    .await
}

#[sqlx::test(migrations = false)]
async fn a_missing_schema_and_a_lost_database_are_pages(pool: PgPool) -> anyhow::Result<()> {
    let lost = options(&pool).host("127.0.0.1").port(1).socket("/nowhere");
    for (options, says) in
        [(&*pool.connect_options(), "idempotency-janitor migrate"), (&lost, "check the database URL")]
    {
        let console = Console::at(options, &[]);
        let client = reqwest::Client::builder().no_proxy().build()?;
        let overview = client.get(&console.url).send().await?;
        assert_eq!(overview.status(), 503);
        let page = overview.text().await?;
        assert!(page.contains(says), "{page}");
        let list = client.get(format!("{}/waiting", console.url)).send().await?.text().await?;
        assert!(list.contains(says), "{list}");
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_list_shows_the_oldest(pool: PgPool) -> anyhow::Result<()> {
    for n in 0..101 {
        let key = Key::new("user:1", "texts", format!("value-{n:010}"))?;
        Fixture::indeterminate(&key, "body")?.with_last_error(format!("error {n}.")).write(&pool).await?;
        testing::age(&pool, &key, std::time::Duration::from_secs(60 * (200 - n))).await?;
    }
    let console = Console::start(&pool, &[]);
    let (_, page) = Visitor::of(&console.url)?.get("/waiting").await?;
    let errors: Vec<u32> =
        page.split("error ").skip(1).filter_map(|rest| rest.split('.').next()?.parse().ok()).collect();
    assert_eq!(errors, (0..100).collect::<Vec<_>>(), "{page}");
    assert!(page.contains("100 keys, the oldest claim first. There are more"), "{page}");
    assert!(page.contains("Of these 100, the first to expire is"), "{page}");
    Ok(())
}

/// What a person needs first: which key is forgotten first, and after the decision the key for the ticket.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_first_key_to_expire_is_named_and_the_receipt_has_the_whole_key(pool: PgPool) -> anyhow::Result<()> {
    lapsed(&pool, &key("value-of-the-oldest-claim"), AT_MOST_ONCE).await?;
    lapsed(&pool, &key("first-to-expire-of-both"), AT_MOST_ONCE).await?;
    let soon = "update idempotency.record set expires_at = now() + interval '30 min' where value like 'first%'";
    sqlx::query(soon).execute(&pool).await?;
    let console = Console::start(&pool, &[]);
    let visitor = Visitor::of(&console.url)?;
    for path in ["/", "/waiting"] {
        let (_, page) = visitor.get(path).await?;
        let (_, first) = page.split_once("The first to expire is").expect("the sentence");
        let (sentence, _) = first.split_once("a repeat is performed").expect("its end");
        assert!(sentence.contains("firs…") && sentence.contains("in 29m"), "{path}: {sentence}");
    }
    let (link, page) = visitor.look_up(&key("first-to-expire-of-both")).await?;
    let (status, receipt) = visitor.settle(&link, &page.1, "no_effect", "").await?;
    assert!(status == 200 && receipt.contains("first-to-expire-of-both"), "{receipt}");
    Ok(())
}

/// A client cannot read the time `infinity`.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_pinned_key_hides_no_other_and_can_be_settled(pool: PgPool) -> anyhow::Result<()> {
    Fixture::completed(&key("completed"), "body", &1)?.write(&pool).await?;
    lapsed(&pool, &key("pinned"), AT_MOST_ONCE).await?;
    sqlx::query("update idempotency.record set expires_at = 'infinity'").execute(&pool).await?;
    lapsed(&pool, &key("waiting"), AT_MOST_ONCE).await?;
    let show = &["show", "user:1", "POST /texts", "pinned"][..];
    for (arguments, code) in [(&["unsettled"][..], 3), (&["stats"], 0), (show, 0), (&["sweep"], 0)] {
        let output = janitor_on(&pool, arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
    }
    let console = Console::start(&pool, &[]);
    let visitor = Visitor::of(&console.url)?;
    let (_, list) = visitor.get("/waiting").await?;
    assert!(list.contains("2 keys, the oldest claim first."), "{list}");
    let (link, page) = visitor.look_up(&key("pinned")).await?;
    assert!(page.1.contains("9999-12-31"), "{page:?}");
    assert_eq!(visitor.settle(&link, &page.1, "forget", "").await?.0, 200);
    Ok(())
}

/// The page, the file and standard output have each decision. The newest comes first on the page.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_log_has_each_decision_with_its_whole_key(pool: PgPool) -> anyhow::Result<()> {
    let (first, second) = (key("the-first-<b>key</b>-of-two"), key("a-step-in-doubt"));
    lapsed(&pool, &first, AT_MOST_ONCE).await?;
    in_doubt(&pool, &second).await?;
    let file = std::env::temp_dir().join(format!("pgi-console-log-{}", uuid::Uuid::new_v4()));
    let path = file.to_str().expect("UTF-8");
    for round in 1..=2 {
        let console = Console::start(&pool, &["--log", path]);
        let visitor = Visitor::of(&console.url)?;
        let (_, empty) = visitor.get("/log").await?;
        assert!(empty.contains("No decision was made yet.") && empty.contains("The last 200 decisions"), "{empty}");
        if round == 2 {
            break;
        }
        for (key, action, response) in [(&first, "no_effect", ""), (&second, "took_effect", "7")] {
            let (link, (_, page)) = visitor.look_up(key).await?;
            let (_, refused) = visitor.settle(&link, &page, "took_effect", "{").await?;
            assert!(refused.contains("not valid JSON"), "this is no decision: {refused}");
            let (status, receipt) = visitor.settle(&link, &page, action, response).await?;
            assert_eq!((status, receipt.contains("class=\"alert\"")), (200, false), "{receipt}");
        }
        let (_, log) = visitor.get("/log").await?;
        let place = |part| log.find(part).unwrap_or_else(|| panic!("{part}: {log}"));
        let newest = place("resolved the step &quot;text&quot;, was indeterminate");
        assert!(newest < place("released, was indeterminate"), "{log}");
        for part in ["the-first-&lt;b&gt;key&lt;/b&gt;-of-two", "a-step-in-doubt", "ticket 4711", "Ada", "s ago", path]
        {
            place(part);
        }
        assert_eq!(console.process.terminate().lines().count(), 2 + 1);
    }
    let lines = std::fs::read_to_string(&file)?;
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&file)?) & 0o777;
    std::fs::remove_file(&file)?;
    assert_eq!(mode, 0o600);
    let lines: Vec<serde_json::Value> = lines.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    assert_eq!(lines.len(), 2, "a restart appends: {lines:?}");
    for (line, (key, decision)) in lines.iter().zip([(&first, "released"), (&second, "resolved the step \"text\"")]) {
        let expected = serde_json::json!({
            "at": line["at"], "token": line["token"], "operator": "Ada", "decision": decision, "state": "indeterminate",
            "scope": key.scope(), "operation": key.operation(), "value": key.value(), "reason": "ticket 4711",
        });
        assert_eq!(line, &expected);
        assert!(line["at"].as_str().is_some_and(|at| at.starts_with("20")) && line["token"].is_string(), "{line}");
    }
    Ok(())
}

/// The decision has committed, so the receipt must not look like a failure. The next decision is a line of its own,
/// also behind a line that was cut off.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_log_file_on_a_full_disk_does_not_make_a_decision_fail(pool: PgPool) -> anyhow::Result<()> {
    if !std::path::Path::new("/dev/full").exists() {
        println!("skipped: this system has no /dev/full");
        return Ok(());
    }
    let [released, later] = ["released", "later"].map(key);
    let directory = std::env::temp_dir().join(format!("pgi-console-{}", uuid::Uuid::new_v4()));
    std::fs::create_dir(&directory)?;
    let [file, link, errors] = ["decisions", "link", "errors"].map(|name| directory.join(name));
    std::os::unix::fs::symlink("/dev/full", &link)?;
    let mut command = command_on(&pool);
    command.args(["console", "--listen", "127.0.0.1:0", "--log"]).arg(&link).stderr(std::fs::File::create(&errors)?);
    let console = Console::of(&mut command);
    let visitor = Visitor::of(&console.url)?;
    for (key, is_full) in [(&released, true), (&later, false)] {
        lapsed(&pool, key, AT_MOST_ONCE).await?;
        let (page_of_key, (_, page)) = visitor.look_up(key).await?;
        let (status, receipt) = visitor.settle(&page_of_key, &page, "no_effect", "").await?;
        assert_eq!((status, receipt.contains("released: scope")), (200, true), "{receipt}");
        let says = ["The decision is made, but could not be written to the log file", "No space left"];
        assert!(says.iter().all(|says| receipt.contains(says) == is_full), "{receipt}");
        assert_eq!(state(&pool, key).await?.as_deref(), Some("released"));
        if is_full {
            std::fs::write(&file, "{\"at\": \"20")?;
            std::fs::remove_file(&link)?;
            std::os::unix::fs::symlink(&file, &link)?;
        }
    }
    let (_, page) = visitor.get("/log").await?;
    assert_eq!(page.matches("not in the file").count(), 1, "{page}");
    assert!(console.process.terminate().contains(" Ada: released"));
    let (warned, written) = (std::fs::read_to_string(&errors)?, std::fs::read_to_string(&file)?);
    std::fs::remove_dir_all(&directory)?;
    assert!(warned.contains("WARN") && warned.contains("is missing in the log file"), "{warned}");
    assert_eq!(
        warned.lines().count(),
        1,
        "standard output has the decisions, so the log does not repeat them: {warned}"
    );
    let last: serde_json::Value = serde_json::from_str(written.lines().last().expect("a line"))?;
    assert_eq!((&last["value"], written.lines().count()), (&"later".into(), 2), "{written}");
    Ok(())
}

/// A pipe with a reader gets each decision. Without a reader, the console does not wait for one: it does not start, or
/// tells that the decision is missing in the file.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_log_in_a_pipe_without_a_reader_holds_nothing_up(pool: PgPool) -> anyhow::Result<()> {
    let pipe = std::env::temp_dir().join(format!("pgi-console-pipe-{}", uuid::Uuid::new_v4()));
    assert!(Command::new("mkfifo").arg(&pipe).status()?.success());
    let path = pipe.to_str().expect("UTF-8");
    let mut bounded = Command::new("timeout");
    // A console that waits for a reader does not end at SIGTERM either.
    bounded.args([
        "--signal=KILL",
        "20",
        env!("CARGO_BIN_EXE_idempotency-janitor"),
        "console",
        "--listen",
        "127.0.0.1:0",
        "--log",
        path,
    ]);
    for (name, value) in command_on(&pool).get_envs() {
        value.map(|value| bounded.env(name, value));
    }
    assert_fails(&bounded.output()?, 2, "no process reads this pipe");

    // Open for both, so that the open does not wait for the other end.
    let reader = std::fs::OpenOptions::new().read(true).write(true).open(&pipe)?;
    let console = Console::start(&pool, &["--log", path]);
    let visitor = Visitor::of(&console.url)?;
    let mut reader = Some(std::io::BufReader::new(reader));
    for value in ["read", "unread"] {
        lapsed(&pool, &key(value), AT_MOST_ONCE).await?;
        let (link, (_, page)) = visitor.look_up(&key(value)).await?;
        let settling = visitor.settle(&link, &page, "no_effect", "");
        let (status, receipt) = tokio::time::timeout(rig::gate::PATIENCE, settling).await.expect("no wait")?;
        assert_eq!((status, receipt.contains("released: scope")), (200, true), "{receipt}");
        let is_missing = receipt.contains("could not be written to the log file");
        assert_eq!((is_missing, state(&pool, &key(value)).await?.as_deref()), (value == "unread", Some("released")));
        if let Some(mut reader) = reader.take() {
            let mut line = String::new();
            std::io::BufRead::read_line(&mut reader, &mut line)?;
            assert_eq!(serde_json::from_str::<serde_json::Value>(&line)?["value"], "read");
        }
    }
    let (_, log) = visitor.get("/log").await?;
    assert_eq!((log.matches("released").count(), log.matches("not in the file").count()), (2, 1), "{log}");
    assert!(console.process.terminate().contains("stopped"));
    std::fs::remove_file(&pipe)?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_search_lists_the_keys_that_begin_so(pool: PgPool) -> anyhow::Result<()> {
    for n in 0..102 {
        Fixture::completed(&key(&format!("payment-of-a-customer-{n:03}")), "body", &n)?.write(&pool).await?;
    }
    let percent = key("50%_<i>\\");
    lapsed(&pool, &percent, AT_MOST_ONCE).await?;
    let console = Console::start(&pool, &["--read-only"]);
    let visitor = Visitor::of(&console.url)?;
    let search = async |scope, operation, value| {
        visitor.post("/find", &[("scope", scope), ("operation", operation), ("value", value), ("search", "true")]).await
    };
    let long = "%".repeat(100_000);
    for (scope, operation, beginning, says) in [
        ("user:1", "POST /texts", "payment-of-a-customer-00", "10 keys."),
        ("user:1", "POST /texts", "payment", "The first 100 keys. There are more"),
        ("user:1", "", "payment-of-a-customer-101", "1 key."),
        ("", "", "payment-of-a-customer-101", "1 key."),
        ("", "", "50%_<i>\\", "1 key."),
        ("user:2", "", "", "There is no such key."),
        ("", "", "_", "There is no such key."),
        ("", "", "pay\0", "There is no such key."),
        ("", "", &long, "There is no such key."),
    ] {
        let (status, page) = search(scope, operation, beginning).await?;
        assert_eq!((status, page.contains(says)), (200, true), "{beginning:?} {says}: {page}");
        if beginning.len() < 100 {
            assert_eq!(field(&page, "scope"), scope, "the search is there to be narrowed");
        }
    }
    let (_, page) = search("user:1", "POST /texts", "payment-of-a-customer-00").await?;
    assert!(page.contains("payment-of-a-customer-00… (25 bytes)"), "what the person has typed: {page}");
    assert!(!page.contains("payment-of-a-customer-001"), "values are shortened: {page}");
    let (_, page) = search("", "", "50%").await?;
    assert!(page.contains("50%… (8 bytes)") && page.contains("indeterminate"), "{page}");
    let link = page.split("href=\"/key/").nth(1).and_then(|rest| rest.split('"').next()).expect("a link");
    let (status, page) = visitor.get(&format!("/key/{link}")).await?;
    assert_eq!((status, page.contains("50%_&lt;i&gt;\\\\")), (200, true), "{page}");
    // The lock is held for as long as the search would read the table.
    let mut lock = pool.begin().await?;
    sqlx::query("lock table idempotency.record").execute(&mut *lock).await?;
    let (status, page) = search("", "", "payment").await?;
    assert_eq!((status, page.contains("The search was stopped after 5s")), (200, true), "{page}");
    lock.rollback().await?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_page_refreshes_only_where_a_person_asks_for_it(pool: PgPool) -> anyhow::Result<()> {
    let console = Console::start(&pool, &[]);
    let client = reqwest::Client::builder().no_proxy().build()?;
    for path in ["/", "/waiting", "/log"] {
        for (query, refresh, link) in [
            ("", None, format!("href=\"{path}?refresh=30\"")),
            ("?refresh=30", Some("30"), format!("href=\"{path}\">Stop refreshing")),
            ("?refresh=0", None, format!("href=\"{path}?refresh=30\"")),
        ] {
            let response = client.get(format!("{}{path}{query}", console.url)).send().await?;
            let header =
                response.headers().get("refresh").map(|value| value.to_str().map(str::to_owned)).transpose()?;
            let page = response.text().await?;
            assert_eq!((header.as_deref(), page.contains(&link)), (refresh, true), "{path}{query}: {page}");
        }
    }
    let find = client.get(format!("{}/find?refresh=30", console.url)).send().await?;
    assert!(!find.headers().contains_key("refresh"), "a person may be typing");
    Ok(())
}

/// The picture, with its text for screen readers.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_timeline_has_each_time_of_a_key(pool: PgPool) -> anyhow::Result<()> {
    let many: Vec<String> = (0..25).map(|n| format!("number {n:02} <b>\u{202e}")).collect();
    let stepped = key("in steps");
    in_doubt_at(&pool, &stepped, &many.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    let completed = key("completed");
    Fixture::completed(&completed, "body", &1)?.write(&pool).await?;
    let live = key("live");
    lapsed(&pool, &live, AT_MOST_ONCE).await?;
    sqlx::query("update idempotency.record set lease_until = now() + interval '3 min' where value = 'live'")
        .execute(&pool)
        .await?;
    let pinned = key("pinned");
    Fixture::completed(&pinned, "body", &1)?.write(&pool).await?;
    sqlx::query("update idempotency.record set expires_at = 'infinity' where value = 'pinned'").execute(&pool).await?;
    let console = Console::start(&pool, &[]);
    let visitor = Visitor::of(&console.url)?;
    for (key, events, says) in [
        (
            &stepped,
            23,
            &["claimed, ", "lease lapsed, ", "number 24 &lt;b… in doubt", "expires, in ", "leaves out the 6"][..],
        ),
        (&completed, 3, &["claimed, ", "completed, ", "expires, in "]),
        (&live, 3, &["claimed, ", "lease ends, in 2m", "expires, in "]),
        (&pinned, 3, &["completed, ", "in more than 1000 years"]),
    ] {
        let (_, (status, page)) = visitor.look_up(key).await?;
        let (_, picture) = page.split_once("<svg class=\"timeline\" role=\"img\"").expect("a picture");
        let (picture, after) = picture.split_once("</svg>").expect("its end");
        let (_, text) = picture.split_once("<desc id=\"timeline-text\">").expect("its text");
        assert_eq!((status, picture.matches("<circle").count()), (200, events), "{key:?}: {page}");
        for part in says {
            assert!(text.contains(part) || after.contains(part), "{part}: {picture}");
        }
        assert!(!picture.contains("<b>") && !picture.contains('\u{202e}') && !picture.contains("NaN"), "{picture}");
        for place in picture.split(" cx=\"").skip(1) {
            let place: f64 = place.split('%').next().expect("a place").parse()?;
            assert!((2.0..=98.0).contains(&place), "{picture}");
        }
    }
    Ok(())
}

/// The samples of the process itself. A moment without an answer is a gap in the line.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_last_hour_is_drawn_from_samples(pool: PgPool) -> anyhow::Result<()> {
    Fixture::completed(&key("completed"), "body", &1)?.write(&pool).await?;
    let console = Console::start(&pool, &["--sample", "1s"]);
    let visitor = Visitor::of(&console.url)?;
    let until = async |done: &dyn Fn(&str) -> bool| {
        let started = std::time::Instant::now();
        loop {
            let (_, page) = visitor.get("/").await?;
            if done(&page) {
                return anyhow::Ok(page);
            }
            anyhow::ensure!(started.elapsed() < rig::gate::PATIENCE, "{page}");
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        }
    };
    let page = until(&|page| page.contains("completed in the last hour: from 1 to 1")).await?;
    assert!(page.contains("Sampled by this console every 1s since") && !page.contains("did not answer"), "{page}");
    sqlx::query("alter table idempotency.record rename to elsewhere").execute(&pool).await?;
    // Longer than from one sample to the next.
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    sqlx::query("alter table idempotency.elsewhere rename to record").execute(&pool).await?;
    Fixture::completed(&key("another"), "body", &1)?.expired().write(&pool).await?;
    sqlx::query("update idempotency.record set expires_at = now() - interval '3 min' where value = 'another'")
        .execute(&pool)
        .await?;
    let page = until(&|page| page.contains("expired in the last hour: from 0 to 1")).await?;
    assert!(page.contains("did not answer"), "{page}");
    assert!(page.contains("Lag of the sweep in the last hour: from 0s to 3m"), "{page}");
    let (_, chart) = page.split_once("aria-label=\"completed in the last hour").expect("a chart");
    let (_, path) = chart.split_once("<path d=\"").expect("a line");
    let (path, _) = path.split_once('"').expect("its end");
    assert!(path.matches('M').count() >= 2, "a gap: {path}");
    assert!(!path.contains("NaN") && !path.contains("inf"), "{path}");
    Ok(())
}
