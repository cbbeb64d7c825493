use std::time::Duration;

/// Sends one operation until its answer is final. Make the key before the first attempt, and store it with the body.
pub(crate) async fn send(http: &reqwest::Client, url: &str, key: &str, body: &str) -> Result<(u16, String), String> {
    let mut problem = String::new();
    for attempt in 0..8 {
        let request = http.post(url).header("Idempotency-Key", format!("\"{key}\""));
        let request = request.header("Content-Type", "application/json").timeout(Duration::from_secs(30));
        let answered = async {
            let response = request.body(body.to_owned()).send().await?;
            let (status, headers) = (response.status().as_u16(), response.headers().clone());
            reqwest::Result::Ok((status, headers, response.text().await?))
        };
        let mut wait = Duration::from_millis(200 << attempt).min(Duration::from_secs(20)).mul_f64(random());
        match answered.await {
            Err(error) => problem = error.to_string(),
            Ok((status, headers, text)) => {
                let problem_json: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
                // Without a problem document, the status decides whether a retry can help.
                let is_retryable = problem_json["retryable"].as_bool().unwrap_or(status >= 500);
                // The API repeats the key. A success without the key comes from a proxy, perhaps after a redirect.
                let is_done = status < 400 && headers.contains_key("Idempotency-Key");
                let is_refused = status >= 400 && !is_retryable && ![408, 425, 429, 502, 503, 504].contains(&status);
                if is_done || is_refused {
                    return Ok((status, text));
                }
                let after = headers.get("Retry-After").and_then(|value| value.to_str().ok()?.parse().ok());
                wait += Duration::from_secs(after.unwrap_or(0));
                problem = format!("{status} {text}");
            }
        }
        tokio::time::sleep(wait).await;
    }
    Err(format!("gave up; keep the key {key} and continue later: {problem}"))
}

/// From 0 to 1.
fn random() -> f64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(0) as f64 / u64::MAX as f64
}
