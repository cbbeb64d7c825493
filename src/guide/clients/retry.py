import http.client, json, random, time, urllib.error, urllib.request

def send(url, key, body):
    """Sends one operation until its answer is final. Make the key before the first attempt, and store it with the body."""
    for attempt in range(8):
        headers = {"Idempotency-Key": f'"{key}"', "Content-Type": "application/json"}
        request = urllib.request.Request(url, data=body.encode(), headers=headers, method="POST")
        wait = random.random() * min(20, 0.2 * 2**attempt)
        try:
            try:
                response = urllib.request.urlopen(request, timeout=30)
            except urllib.error.HTTPError as error:
                response = error
            with response:
                status, text = response.status, response.read().decode()
            # The API repeats the key. A success without the key comes from a proxy, perhaps after a redirect.
            if not is_retryable(status, text) and (status >= 400 or "Idempotency-Key" in response.headers):
                return status, text
            wait += int(response.headers.get("Retry-After", 0))
            problem = f"{status} {text}"
        except (OSError, ValueError, http.client.HTTPException) as error:  # no answer, or half of one
            problem = str(error)
        time.sleep(wait)
    raise TimeoutError(f"gave up; keep the key {key} and continue later: {problem}")

def is_retryable(status, text):
    if status < 400:
        return False
    if status in (408, 425, 429, 502, 503, 504):
        return True
    try:
        return json.loads(text)["retryable"] is True
    except (ValueError, LookupError, TypeError):  # no problem document
        return status >= 500
