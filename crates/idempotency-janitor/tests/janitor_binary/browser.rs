//! `console` in a headless browser without JavaScript: a person settles keys with the keyboard alone, on a wide and on
//! a narrow screen, in light and in dark, and a hostile key stays text. axe-core, which npm installs below
//! `target/tmp`, finds no violation on any page. Skipped where there is no Chromium, no chromedriver or no npm.
//!
//! `CONSOLE_SCREENSHOTS=docs/console cargo test -p idempotency-janitor browser` also writes the pictures of the docs.

use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::ensure;
use base64::Engine as _;
use pg_idempotency::testing;
use pg_idempotency::{Key, operator};
use rig::fixture::Fixture;
use rig::gate::PATIENCE;
use serde_json::{Value, json};
use sqlx::PgPool;

use crate::console::Console;
use crate::support::{AT_MOST_ONCE, in_doubt, in_doubt_at, lapsed};

/// The script of axe-core. Installed once for each state of the lock file, because an installation that was interrupted
/// must not count.
fn axe() -> Result<&'static str, &'static str> {
    static AXE: OnceLock<Result<String, String>> = OnceLock::new();
    let install = || {
        let pinned = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/janitor_binary/browser");
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("browser");
        let lock = fs::read(pinned.join("package-lock.json"))?;
        if fs::read(place.join("complete")).ok().as_ref() != Some(&lock) {
            if place.exists() {
                fs::remove_dir_all(&place)?;
            }
            fs::create_dir_all(&place)?;
            for file in ["package.json", "package-lock.json"] {
                fs::copy(pinned.join(file), place.join(file))?;
            }
            let ci = ["300", "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"];
            let status = Command::new("timeout").args(ci).current_dir(&place).status()?;
            ensure!(status.success(), "npm ci: {status}");
            fs::write(place.join("complete"), lock)?;
        }
        Ok(fs::read_to_string(place.join("node_modules/axe-core/axe.min.js"))?)
    };
    let installed =
        AXE.get_or_init(|| install().map_err(|error| format!("axe-core could not be installed: {error:#}")));
    installed.as_deref().map_err(String::as_str)
}

/// Runs the driver and its browser in a session and a home of their own. Both go when the test's end of the pipe is
/// closed, and that is also when the test panics or is killed.
const SUPERVISOR: &str = r#"
    HOME=$(mktemp -d "${TMPDIR:-/tmp}/pgi-browser.XXXXXX") || exit 1
    export HOME TMPDIR="$HOME"
    setsid chromedriver --port="$1" </dev/null >/dev/null 2>&1 &
    cat
    kill -KILL "-$!"
    wait
    # A process that is being killed may still write.
    until rm -rf "$HOME"; do sleep 0.1; done 2>/dev/null
"#;

const ENTER: &str = "\u{e007}";
const DOWN: &str = "\u{e015}";

struct Browser {
    axe: &'static str,
    supervisor: Child,
    client: reqwest::Client,
    session: String,
}

impl Drop for Browser {
    fn drop(&mut self) {
        drop(self.supervisor.stdin.take());
        let _ = self.supervisor.wait();
    }
}

impl Browser {
    /// `None` where something is missing, which is said.
    async fn start() -> anyhow::Result<Option<Self>> {
        let programs = "(command -v chromium || command -v google-chrome) && command -v chromedriver";
        if !Command::new("sh").args(["-c", programs]).stdout(Stdio::null()).status()?.success() {
            println!("skipped: there is no Chromium or no chromedriver in PATH");
            return Ok(None);
        }
        let axe = match axe() {
            Ok(axe) => axe,
            Err(reason) => {
                println!("skipped: {reason}");
                return Ok(None);
            }
        };
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let driver = format!("http://127.0.0.1:{port}");
        let mut command = Command::new("sh");
        // A test runner that is killed takes its group with it, and the supervisor is to clean up.
        command.args(["-c", SUPERVISOR, "supervisor", &port.to_string()]).stdin(Stdio::piped()).process_group(0);
        let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build()?;
        let mut browser = Self { axe, supervisor: command.spawn()?, client, session: format!("{driver}/session") };
        let started = Instant::now();
        while browser.client.get(format!("{driver}/status")).send().await.is_err() {
            ensure!(started.elapsed() < PATIENCE, "chromedriver does not start");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // A browser as root needs --no-sandbox.
        let arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"];
        let options = json!({"goog:chromeOptions": {"args": arguments}});
        let session = browser.post("", json!({"capabilities": {"alwaysMatch": options}})).await?;
        browser.session = format!("{}/{}", browser.session, session["sessionId"].as_str().expect("a session"));
        browser.allow_scripts(false).await?;
        Ok(Some(browser))
    }

    async fn post(&self, path: &str, body: Value) -> anyhow::Result<Value> {
        let answer = self.client.post(format!("{}{path}", self.session)).json(&body).send().await?;
        Ok(answer.error_for_status()?.json::<Value>().await?["value"].take())
    }

    async fn devtools(&self, command: &str, parameters: Value) -> anyhow::Result<Value> {
        self.post("/goog/cdp/execute", json!({"cmd": command, "params": parameters})).await
    }

    /// Whether a page may run scripts. The test's own scripts run in any case, but have no timers then.
    async fn allow_scripts(&self, allowed: bool) -> anyhow::Result<()> {
        self.devtools("Emulation.setScriptExecutionDisabled", json!({"value": !allowed})).await?;
        Ok(())
    }

    async fn open(&self, url: &str, width: u32, scheme: &str) -> anyhow::Result<()> {
        let screen = json!({"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": false});
        self.devtools("Emulation.setDeviceMetricsOverride", screen).await?;
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.devtools("Emulation.setEmulatedMedia", features).await?;
        self.post("/url", json!({"url": url})).await?;
        Ok(())
    }

    async fn run(&self, script: &str, argument: &str) -> anyhow::Result<Value> {
        self.post("/execute/sync", json!({"script": script, "args": [argument]})).await
    }

    /// Waits until the page contains this: a key returns before the next page is there. Nothing on it is wider than the
    /// screen, nothing runs that the page brought along, and axe-core finds nothing.
    async fn sees(&self, text: &str) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            let page = self.run("return document.body.innerText", "").await.unwrap_or_default();
            if page.as_str().is_some_and(|page| page.contains(text)) {
                let sound = "const page = document.documentElement; return page.scrollWidth <= page.clientWidth
                    && !window.hacked && !document.querySelector('script, img')";
                assert_eq!(self.run(sound, "").await?, true, "{page}");
                return self.is_accessible().await;
            }
            ensure!(started.elapsed() < PATIENCE, "{text:?} is not on the page: {page}");
        }
    }

    async fn is_accessible(&self) -> anyhow::Result<()> {
        let script = "const done = arguments[1]; axe.run(document, {resultTypes: ['violations']}).then(
            found => done([found.passes.length, found.violations.map(rule => [rule.id, rule.help,
                ...rule.nodes.map(node => node.html + ' ' + node.failureSummary)])]),
            error => done(String(error)))";
        let script = format!("{}; {script}", self.axe);
        self.allow_scripts(true).await?;
        let found = self.post("/execute/async", json!({"script": script, "args": [""]})).await?;
        self.allow_scripts(false).await?;
        ensure!(found[0].as_u64().is_some_and(|rules| rules > 10), "axe-core has not run: {found}");
        ensure!(found[1] == json!([]), "{found:#}");
        Ok(())
    }

    async fn press(&self, keys: &str) -> anyhow::Result<()> {
        let stroke = |key| [json!({"type": "keyDown", "value": key}), json!({"type": "keyUp", "value": key})];
        let strokes: Vec<_> = keys.chars().flat_map(stroke).collect();
        self.post("/actions", json!({"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})).await?;
        Ok(())
    }

    /// Presses Tab until this element has the focus, visibly, and then these keys.
    async fn tab_to(&self, element: &str, keys: &str) -> anyhow::Result<()> {
        for _ in 0..60 {
            self.press("\u{e004}").await?;
            let there = "return document.activeElement.matches(`:is(${arguments[0]}):focus-visible`)";
            if self.run(there, element).await? == true {
                return self.press(keys).await;
            }
        }
        anyhow::bail!("{element} cannot be reached with the keyboard")
    }

    /// Of the whole page, into the directory that is asked for.
    async fn picture(&self, name: &str) -> anyhow::Result<()> {
        let Some(directory) = std::env::var_os("CONSOLE_SCREENSHOTS") else { return Ok(()) };
        let height = self.run("return document.body.offsetHeight", "").await?;
        let clip = json!({"clip": {"x": 0, "y": 0, "width": 1280, "height": height, "scale": 1}, "captureBeyondViewport": true});
        let picture = self.devtools("Page.captureScreenshot", clip).await?;
        let picture = base64::prelude::BASE64_STANDARD.decode(picture["data"].as_str().expect("a picture"))?;
        let directory = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(directory);
        Ok(std::fs::write(directory.join(format!("{name}.png")), picture)?)
    }
}

const HOSTILE: &str = "\"><script>window.hacked=1</script><img src=x onerror=window.hacked=1>";

/// A payment whose caller died so many hours ago.
async fn payment(pool: &PgPool, value: &str, hours: f64, last_error: &str) -> anyhow::Result<Key> {
    let key = Key::new("tenant:17", "POST /payments", value)?;
    lapsed(pool, &key, AT_MOST_ONCE).await?;
    let aged = "update idempotency.record set claimed_at = now() - $1::float8 * interval '1 h', last_error = $2 where value = $3";
    sqlx::query(aged).bind(hours).bind(last_error).bind(value).execute(pool).await?;
    Ok(key)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_keyboard_alone_settles_on_every_screen(pool: PgPool) -> anyhow::Result<()> {
    let Some(browser) = Browser::start().await? else { return Ok(()) };
    for n in 0..40 {
        let key = Key::new("tenant:17", "POST /payments", format!("completed-{n}"))?;
        Fixture::completed(&key, "body", &n)?.write(&pool).await?;
    }
    payment(&pool, "0b7f7a52-8a0c-4d0e-9f5e-1c1f8e5b2a10", 5.0, "no answer within 10 s").await?;
    payment(&pool, "5a1d93c2-8f6e-4a34-9f50-0f0b9f1c9a11", 3.0, "no answer within 10 s").await?;
    let ride = Key::new("tenant:17", "POST /rides", "e7a4e9d0-64a8-4c59-b5c1-2b8d5c1f4a13")?;
    in_doubt(&pool, &ride).await?;
    testing::age(&pool, &ride, Duration::from_secs(20 * 3600)).await?;
    let begun = "update idempotency.record set lease_until = claimed_at + interval '8 min', steps = jsonb_set(
        jsonb_set(steps, '{ride,at}', to_jsonb(claimed_at + interval '1 min')),
        '{text,begun}', to_jsonb(claimed_at + interval '2 min')) where steps is not null";
    sqlx::query(begun).execute(&pool).await?;
    let console = Console::start(&pool, &[]);
    browser.open(&console.url, 1280, "light").await?;
    browser.sees("3 keys wait").await?;
    browser.picture("overview").await?;
    browser.tab_to("main a[href='/waiting']", ENTER).await?;
    browser.sees("3 keys, the oldest").await?;
    browser.picture("waiting").await?;
    browser.tab_to("tbody a", ENTER).await?;
    browser.sees("What happened?").await?;
    browser.picture("step-in-doubt").await?;

    let (light, dark) = (("light", "rgb(255, 255, 255)"), ("dark", "rgb(21, 25, 29)"));
    for (width, (scheme, background)) in [(1280, light), (1280, dark), (320, light), (320, dark)] {
        let key = payment(&pool, &format!("{HOSTILE}{width}{scheme}"), 22.0, HOSTILE).await?;
        browser.open(&console.url, width, scheme).await?;
        browser.sees("4 keys wait").await?;
        let colour = browser.run("return getComputedStyle(document.body).backgroundColor", "").await?;
        assert_eq!(colour, background, "{scheme}");
        browser.tab_to("nav a[href='/waiting']", ENTER).await?;
        browser.sees("4 keys, the oldest").await?;
        browser.tab_to("tbody a", ENTER).await?;
        browser.sees(key.value()).await?;
        browser.tab_to("[name=action]", " ").await?;
        browser.tab_to("[name=response]", "{\"payment\": 1}").await?;
        browser.tab_to("[name=reason]", "ticket 5").await?;
        browser.tab_to("[name=operator]", "Grace").await?;
        browser.tab_to("main button", ENTER).await?;
        browser.sees("Are you sure?").await?;
        browser.tab_to("main button", ENTER).await?;
        browser.sees("resolved: scope").await?;
        assert_eq!(operator::show(&pool, &key).await?.map(|shown| shown.state), Some(operator::State::Completed));
    }
    Ok(())
}

/// The pages that the other test does not open.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_page_is_readable_on_every_screen(pool: PgPool) -> anyhow::Result<()> {
    let Some(browser) = Browser::start().await? else { return Ok(()) };
    let ride = Key::new("tenant:17", "POST /rides", "e7a4e9d0-64a8-4c59-b5c1-2b8d5c1f4a13")?;
    in_doubt_at(&pool, &ride, &["a step with a name that is far too long for a narrow screen", HOSTILE]).await?;
    sqlx::query(
        "update idempotency.record set request = '\"body\"', probes = jsonb_build_object('token', token,
            'lease_until', btrim(to_jsonb(lease_until at time zone 'UTC')::text, '\"'),
            'of', (
                select jsonb_agg(jsonb_build_object('step', step, 'probes', 2, 'no_trace', 1, 'finding', 'no_trace',
                    'error', null, 'at', extract(epoch from now() - interval '1 min'),
                    'next', extract(epoch from now() + interval '10 min')))
                from jsonb_array_elements(jsonb_path_query_array(steps, '$.keyvalue() ? (exists (@.value.begun)).key'))
                    as step
            ))",
    )
    .execute(&pool)
    .await?;
    let console = Console::start(&pool, &["--sample", "1s"]);
    for (width, scheme, hours) in [(1280, "light", 1.0), (1280, "dark", 2.0), (320, "light", 3.0), (320, "dark", 4.0)] {
        payment(&pool, &format!("{width}{scheme}"), hours, "no answer").await?;
        browser.open(&console.url, width, scheme).await?;
        browser.tab_to("main a[href='/?refresh=30']", ENTER).await?;
        browser.sees("This page refreshes every 30 s").await?;
        browser.tab_to("main a[href='/']", ENTER).await?;
        browser.sees("Refresh every 30 s").await?;
        browser.tab_to("nav a[href='/find']", ENTER).await?;
        browser.sees("A search lists the keys").await?;
        browser.tab_to("[name=scope]", "tenant:17").await?;
        browser.tab_to("[name=search]", ENTER).await?;
        browser.sees("Found").await?;
        browser.tab_to("tbody tr:last-child a", ENTER).await?;
        browser.sees("next probe of").await?;
        browser.open(&format!("{}/log", console.url), width, scheme).await?;
        browser.sees("decisions of this console").await?;
        browser.open(&format!("{}/waiting", console.url), width, scheme).await?;
        browser.tab_to("tbody a", ENTER).await?;
        // The second of the actions.
        browser.tab_to("[name=action]", DOWN).await?;
        browser.tab_to("[name=reason]", HOSTILE).await?;
        browser.tab_to("[name=operator]", "Grace").await?;
        browser.tab_to("main button", ENTER).await?;
        browser.sees("Are you sure?").await?;
        browser.tab_to("main button", ENTER).await?;
        browser.sees("released: scope").await?;
        browser.tab_to("nav a[href='/log']", ENTER).await?;
        browser.sees("released, was indeterminate").await?;
        browser.open(&format!("{}/nowhere", console.url), width, scheme).await?;
        browser.sees("cannot answer this request").await?;
    }
    Ok(())
}
