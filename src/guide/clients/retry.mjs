/** Sends one operation until its answer is final. Make the key before the first attempt, and store it with the body. */
export async function send(url, key, body) {
  let problem;
  for (let attempt = 0; attempt < 8; attempt++) {
    let wait = Math.random() * Math.min(20_000, 200 * 2 ** attempt);
    try {
      const headers = { "Idempotency-Key": `"${key}"`, "Content-Type": "application/json" };
      const response = await fetch(url, { method: "POST", headers, body, signal: AbortSignal.timeout(30_000) });
      const text = await response.text();
      // The API repeats the key. A success without the key comes from a proxy, perhaps after a redirect.
      const isOfTheApi = response.status >= 400 || response.headers.has("Idempotency-Key");
      if (isOfTheApi && !isRetryable(response.status, text)) return { status: response.status, text };
      wait += 1000 * Number(response.headers.get("Retry-After") ?? 0);
      problem = `${response.status} ${text}`;
    } catch (error) {
      problem = error; // no answer, or half of one
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
  throw new Error(`gave up; keep the key ${key} and continue later: ${problem}`);
}

function isRetryable(status, text) {
  if (status < 400) return false;
  if ([408, 425, 429, 502, 503, 504].includes(status)) return true;
  try {
    return JSON.parse(text).retryable ?? status >= 500;
  } catch {
    return status >= 500; // no problem document
  }
}
