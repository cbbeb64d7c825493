//! `console` in a headless browser: a person settles keys with the keyboard alone, on a wide and on a narrow screen, in
//! light and in dark, and a hostile key stays text. Skipped where there is no Chromium or no chromedriver.
//!
//! `CONSOLE_SCREENSHOTS=docs/console cargo test -p idempotency-janitor browser` also writes the pictures of the docs.

use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use pg_idempotency::testing;
use pg_idempotency::{Key, operator};
use rig::fixture::Fixture;
use rig::gate::PATIENCE;
use serde_json::{Value, json};
use sqlx::PgPool;

use crate::console::Console;
use crate::support::{AT_MOST_ONCE, in_doubt, lapsed};

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

struct Browser {
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
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let driver = format!("http://127.0.0.1:{port}");
        let mut command = Command::new("sh");
        // A test runner that is killed takes its group with it, and the supervisor is to clean up.
        command.args(["-c", SUPERVISOR, "supervisor", &port.to_string()]).stdin(Stdio::piped()).process_group(0);
        let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build()?;
        let mut browser = Self { supervisor: command.spawn()?, client, session: format!("{driver}/session") };
        let started = Instant::now();
        while browser.client.get(format!("{driver}/status")).send().await.is_err() {
            anyhow::ensure!(started.elapsed() < PATIENCE, "chromedriver does not start");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // A browser as root needs --no-sandbox.
        let arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"];
        let options = json!({"goog:chromeOptions": {"args": arguments}});
        let session = browser.post("", json!({"capabilities": {"alwaysMatch": options}})).await?;
        browser.session = format!("{}/{}", browser.session, session["sessionId"].as_str().expect("a session"));
        Ok(Some(browser))
    }

    async fn post(&self, path: &str, body: Value) -> anyhow::Result<Value> {
        let answer = self.client.post(format!("{}{path}", self.session)).json(&body).send().await?;
        Ok(answer.error_for_status()?.json::<Value>().await?["value"].take())
    }

    async fn devtools(&self, command: &str, parameters: Value) -> anyhow::Result<Value> {
        self.post("/goog/cdp/execute", json!({"cmd": command, "params": parameters})).await
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
    /// screen, and nothing runs that the page brought along.
    async fn sees(&self, text: &str) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            let page = self.run("return document.body.innerText", "").await.unwrap_or_default();
            if page.as_str().is_some_and(|page| page.contains(text)) {
                let sound = "const page = document.documentElement; return page.scrollWidth <= page.clientWidth
                    && !window.hacked && !document.querySelector('script, img')";
                assert_eq!(self.run(sound, "").await?, true, "{page}");
                return Ok(());
            }
            anyhow::ensure!(started.elapsed() < PATIENCE, "{text:?} is not on the page: {page}");
        }
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
    for (width, (scheme, background)) in [(1280, light), (1280, dark), (400, light), (400, dark)] {
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
